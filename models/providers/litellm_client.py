"""The only module that imports LiteLLM: one completion, its errors by class, and prices.

LiteLLM is imported at first use (2 s), with its price table from the package and its own retries, cache and fallbacks
off: its cache needs an undeclared package, its fallbacks answer from another model without saying so, and retries
belong to the caller, who reserves each one against the caps.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from errors import ConfigurationError, ProviderError


class ModelSettings(Protocol):
    """What a completion needs to know of the analyst's settings."""

    @property
    def model(self) -> str: ...
    @property
    def api_base(self) -> str: ...
    @property
    def api_key_variable(self) -> str: ...
    @property
    def structured(self) -> Literal["schema", "object", "text"]: ...
    @property
    def max_tokens(self) -> int: ...


@dataclass(frozen=True)
class Completion:
    """A reply: its text, whether it was cut at the token limit, why it was refused ("" when not), and its tokens."""

    content: str
    truncated: bool
    refusal: str
    prompt_tokens: int
    sampled_tokens: int


class SlowDown(ProviderError):
    """The provider asked to wait `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, transient=True)
        self.retry_after = retry_after


async def complete(
    settings: ModelSettings,
    messages: Sequence[dict[str, str]],
    *,
    schema: type[BaseModel],
    temperature: float | None,
    seconds: float,
) -> Completion:
    """One completion within `seconds`; without a temperature none is sent. Raises `ProviderError` (`transient` for
    time-outs, lost connections, 408, 409, 429 and 5xx) and `ConfigurationError` for a missing key, an unknown model, or
    no structured output."""
    litellm, openai = litellm_modules()
    options: dict[str, Any] = {}
    if settings.structured == "schema":
        described = {"name": schema.__name__, "schema": _strict(schema.model_json_schema()), "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": described}
    elif settings.structured == "object":
        options["response_format"] = {"type": "json_object"}
    if settings.api_base:
        options["api_base"] = settings.api_base
    options["api_key"] = key_of(settings)
    if temperature is not None:
        options["temperature"] = temperature
    call = litellm.acompletion(
        model=settings.model, messages=list(messages), max_tokens=settings.max_tokens, timeout=seconds, num_retries=0,
        max_retries=0, **options,
    )  # fmt: skip
    try:
        # LiteLLM's own time-out is per read: a server that trickles would pass any deadline.
        response = await asyncio.wait_for(call, seconds)
    except TimeoutError as error:
        raise ProviderError(f"{settings.model} did not answer within {seconds:.3g} s", transient=True) from error
    except openai.OpenAIError as error:
        raise classified(settings, error) from error
    choice = response.choices[0]
    usage = getattr(response, "usage", None)
    # LiteLLM keeps the protocol's `refusal` under the provider's own fields for some providers.
    fields = getattr(choice.message, "provider_specific_fields", None) or {}
    refusal = str(getattr(choice.message, "refusal", None) or fields.get("refusal") or "")
    if choice.finish_reason == "content_filter":
        refusal = refusal or "the provider's filter stopped it"
    return Completion(
        content=choice.message.content or "",
        truncated=choice.finish_reason == "length",
        refusal=refusal,
        prompt_tokens=int(getattr(usage, "prompt_tokens", 0) or 0),
        sampled_tokens=int(getattr(usage, "completion_tokens", 0) or 0),
    )


def price_of(model: str, prompt_price: float | None, sampled_price: float | None) -> tuple[float, float] | None:
    """Dollars per million (prompt, sampled) tokens: as given, else LiteLLM's table, else None."""
    if prompt_price is not None and sampled_price is not None:
        return prompt_price, sampled_price
    litellm, _ = litellm_modules()
    for name in (model, model.partition("/")[2]):
        row = litellm.model_cost.get(name)
        if row and "input_cost_per_token" in row and "output_cost_per_token" in row:
            return float(row["input_cost_per_token"]) * 1e6, float(row["output_cost_per_token"]) * 1e6
    return None


def bad_release(release: str) -> bool:
    """Whether a release of LiteLLM is one of those that carried a credential stealer."""
    return release in ("1.82.7", "1.82.8") or release.startswith("1.107.")


@lru_cache(maxsize=1)
def litellm_modules() -> tuple[Any, Any]:
    """(litellm, openai): LiteLLM's exceptions are subclasses of openai's."""
    release = version("litellm")
    if bad_release(release):
        raise ConfigurationError(
            f"litellm {release} carried a credential stealer; install the pinned version and rotate keys"
        )
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    import openai

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    litellm.drop_params = False
    return litellm, openai


def key_of(settings: ModelSettings) -> str | None:
    if not settings.api_key_variable:
        # A server of one's own needs none, but the client insists on a word.
        return "none" if settings.api_base else None
    key = os.environ.get(settings.api_key_variable)
    if not key:
        raise ConfigurationError(
            f"the environment variable {settings.api_key_variable!r} that should hold the key is empty"
        )
    return key


def classified(settings: ModelSettings, error: Any) -> Exception:
    status, text = getattr(error, "status_code", None), str(error)[:400]
    if status == 400 and settings.structured != "text" and _about_format(text):
        return ConfigurationError(
            f"{settings.model} does not know structured output ({text}); set structured to 'object' or 'text'"
        )
    if status in (401, 403, 404):
        return ConfigurationError(f"{settings.model} cannot be used ({status}): {text}; check model, api_base and key")
    if status == 429:
        headers = getattr(error, "litellm_response_headers", None) or {}
        asked = str(headers.get("retry-after", ""))
        return SlowDown(f"{settings.model} asks to slow down: {text}", float(asked) if asked.isdecimal() else 0.0)
    # A success whose body is no completion comes from a proxy in trouble.
    transient = status is None or status < 400 or status in (408, 409) or status >= 500
    return ProviderError(f"{settings.model} failed ({status or 'no answer'}): {text}", transient=transient)


def _about_format(text: str) -> bool:
    return any(word in text.lower() for word in ("response_format", "json_schema", "structured output", "guided"))


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as strict servers want it: no further properties, and every property required."""
    if schema.get("type") == "object" and "properties" in schema:
        schema = schema | {"additionalProperties": False, "required": list(schema["properties"])}
    return {key: _strict_part(value) for key, value in schema.items()}


def _strict_part(value: Any) -> Any:
    if isinstance(value, dict):
        return _strict(value)
    return [_strict_part(part) for part in value] if isinstance(value, list) else value
