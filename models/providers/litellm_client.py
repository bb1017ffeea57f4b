"""The only module that imports LiteLLM: one call and its reply, failures by class, prices, and what LiteLLM knows.

LiteLLM is imported at first use (2 s), with its price table from the package and its own retries, cache and fallbacks
off: its cache needs an undeclared package, its fallbacks answer from another model without saying so, and retries
belong to the caller, whose client (`models.providers.client`) reserves each one against the cap.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from errors import ConfigurationError, ProviderError
from settings_parts import shown_variable

logger = logging.getLogger("trace.models")

_ABOUT_CONTEXT = ("context length", "context window", "maximum context", "too many tokens", "prompt is too long")
# Variables that may hold what LiteLLM sends to a provider: every provider has names of its own.
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
# A shorter value of such a variable is a switch or a number, and words of the message would go with it.
_SHORTEST_SECRET = 8
# What providers behind a gateway of another kind say where their filter took the prompt.
_ABOUT_FILTER = ("content management policy", "content_filter", "content policy")
# The reasons for an end of a reply that broke off: OpenRouter's where the provider behind it failed, and vLLM's and
# SGLang's where the server ended the request. LiteLLM makes "stop" of them, and keeps them beside it.
_BROKEN_OFF = ("error", "abort")
# HTTP's "Payment Required".
UNPAID = 402
_ABOUT_FORMAT = ("response_format", "json_schema", "structured output", "guided")


@dataclass(frozen=True)
class ModelCall:
    """One call of a language model. `purpose` is the name that its cost is stored under.

    `messages` and `tools` have OpenAI's form. `max_tokens` None leaves the length of the reply to the provider,
    `temperature` None sends none, `seconds` is the longest wait for the whole reply. Without `api_base` and
    `api_key_variable` (the name of an environment variable) LiteLLM's own variables decide. `price` is dollars per
    million (prompt, sampled) tokens, None takes LiteLLM's table. `options` are sent as they are.
    """

    purpose: str
    model: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    seconds: float = 120.0
    api_base: str = ""
    api_key_variable: str = ""
    price: tuple[float, float] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CalledTool:
    """One tool call of a reply; `arguments` is the text that the model wrote."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class Completion:
    """A reply. `refusal` says why the model refused ("" when it did not), `finish` is the protocol's reason for its end
    ("" without any content from a provider that gave no choice, or whose reply broke off), `model` the name that the
    provider gave."""

    content: str
    calls: tuple[CalledTool, ...] = ()
    finish: str = "stop"
    refusal: str = ""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    dollars: float = 0.0
    model: str = ""

    @property
    def truncated(self) -> bool:
        """Whether the reply was cut at the token limit."""
        return self.finish == "length"


class CallFailed(ProviderError):
    """A call without a reply. `text` is what the provider said, `status` its HTTP status (None without an answer),
    `retry_after` the seconds that it asks to wait; `too_long` is set when the prompt exceeds the model's context,
    `filtered` when the provider's filter of content took the prompt, `late` when the whole reply did not come in the
    call's seconds."""

    def __init__(self, message: str, text: str, status: int | None = None, *, transient: bool) -> None:
        super().__init__(message, transient=transient, unpaid=status == UNPAID)
        self.text, self.status = text, status
        self.retry_after, self.too_long, self.filtered, self.late = 0.0, False, False, False

    @classmethod
    def overdue(cls, call: ModelCall) -> CallFailed:
        """The failure of a call whose seconds are over."""
        text = f"did not answer within {call.seconds:.4g} s"
        problem = cls(f"{call.model} {text}", text, transient=True)
        problem.late = True
        return problem


async def send(call: ModelCall) -> Completion:
    """The reply to one call within `call.seconds`. Raises `CallFailed` (`transient` for time-outs, lost connections,
    408, 409, 429 and 5xx) and `ConfigurationError` for a missing key. Only `ModelClient` calls this: nothing here
    counts what it costs."""
    litellm, openai = litellm_modules()
    given: dict[str, Any] = {**call.options, "api_key": _key(call)}
    if call.tools:
        given["tools"] = [dict(tool) for tool in call.tools]
    if call.max_tokens is not None:
        given["max_tokens"] = call.max_tokens
    if call.temperature is not None:
        given["temperature"] = call.temperature
    if call.api_base:
        given["api_base"] = call.api_base
    messages = [dict(message) for message in call.messages]
    asked = litellm.acompletion(
        model=call.model, messages=messages, timeout=call.seconds, num_retries=0, max_retries=0, **given
    )
    began = time.monotonic()
    try:
        # LiteLLM's own time-out is per read: a server that trickles would pass any deadline.
        response = await asyncio.wait_for(asked, call.seconds)
    except TimeoutError as error:
        raise CallFailed.overdue(call) from error
    except openai.OpenAIError as error:
        failure = _failure(call, error)
        failure.late = time.monotonic() - began >= call.seconds  # its own time-out may come first
    else:
        return _completion(call, response)
    # Outside of the handler: LiteLLM's own error as its cause or context would show in logs what the server quoted.
    raise failure


def _completion(call: ModelCall, response: Any) -> Completion:
    usage = getattr(response, "usage", None)
    # A server that counts below zero would give money back to the cap, and is taken for one that counts nothing.
    prompt = max(0, int(getattr(usage, "prompt_tokens", 0) or 0))
    sampled = max(0, int(getattr(usage, "completion_tokens", 0) or 0))
    counted: dict[str, Any] = {"prompt_tokens": prompt, "sampled_tokens": sampled}
    counted |= {"dollars": _cost(call, response, prompt, sampled)}
    counted |= {"model": str(getattr(response, "model", "") or call.model)}
    if not response.choices:
        return Completion("", finish="", **counted)
    choice = response.choices[0]
    ended = getattr(choice, "provider_specific_fields", None) or {}
    if ended.get("native_finish_reason") in _BROKEN_OFF or ended.get("error"):
        return Completion("", finish="", **counted)
    message = choice.message
    # LiteLLM keeps the protocol's `refusal` under the provider's own fields for some providers.
    fields = getattr(message, "provider_specific_fields", None) or {}
    refusal = str(getattr(message, "refusal", None) or fields.get("refusal") or "")
    calls = tuple(
        CalledTool(str(item.function.name or ""), item.function.arguments or "{}", str(item.id or ""))
        for item in message.tool_calls or ()
    )
    return Completion(encodable(message.content or ""), calls, str(choice.finish_reason), encodable(refusal), **counted)


def encodable(text: str) -> str:
    """The text as the next request can hold it: half a character, as a smiley cut in two leaves it, becomes a question
    mark."""
    return text.encode("utf-8", "replace").decode()


def _cost(call: ModelCall, response: Any, prompt: int, sampled: int) -> float:
    """Dollars of a response: LiteLLM's own count (it knows cached tokens), or the given price, or 0 where unknown."""
    price = call.price or price_of(call.model)
    if price is None:
        return 0.0
    if call.price is None:
        litellm, _ = litellm_modules()
        try:
            return max(0.0, float(litellm.completion_cost(completion_response=response, model=call.model)))
        except Exception as problem:  # `price_of` also takes another provider's price; the reply is paid and must stay
            logger.debug("LiteLLM cannot count what %s cost (%s)", call.model, problem)
    return (prompt * price[0] + sampled * price[1]) / 1e6


def _failure(call: ModelCall, error: Any) -> CallFailed:
    litellm, _ = litellm_modules()
    model = call.model
    status, text = getattr(error, "status_code", None), _without_secrets(str(error), call.api_key_variable)[:400]
    if status == 429:
        problem = CallFailed(f"{model} asks to slow down: {text}", text, status, transient=True)
        asked = str((getattr(error, "litellm_response_headers", None) or {}).get("retry-after", ""))
        problem.retry_after = float(asked) if asked.isdecimal() else 0.0
        return problem
    # A success whose body is no completion comes from a proxy in trouble.
    transient = status is None or status < 400 or status in (408, 409) or status >= 500
    mend = "; pay its provider, or name another model" if status == UNPAID else ""
    problem = CallFailed(f"{model} failed ({status or 'no answer'}): {text}{mend}", text, status, transient=transient)
    about_context = status == 400 and any(words in str(error).lower() for words in _ABOUT_CONTEXT)
    problem.too_long = about_context or isinstance(error, litellm.ContextWindowExceededError)
    about_filter = status == 400 and any(words in str(error).lower() for words in _ABOUT_FILTER)
    problem.filtered = about_filter or isinstance(error, litellm.ContentPolicyViolationError)
    return problem


def _without_secrets(text: str, key_variable: str) -> str:
    """The text with `***` for each key that may have been sent: servers quote it in their errors, and these are
    stored."""
    secrets = {v for n, v in os.environ.items() if _SECRET_NAME.search(n) and len(v) >= _SHORTEST_SECRET}
    secrets = {secret.strip() for secret in secrets | {os.environ.get(key_variable, "")}} - {""}
    spelled = {form for s in secrets for form in (s, quote(s, safe=""), json.dumps(s)[1:-1], repr(s)[1:-1])}
    for secret in sorted(spelled, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def explained(problem: CallFailed, model: str, structured: bool = False) -> ProviderError | ConfigurationError:
    """The failure as it should be raised: a `ConfigurationError` for a key, a model or an address that no retry mends,
    and for a server that does not know the structured output that was asked for; else the failure itself."""
    if problem.status == 400 and structured and any(words in problem.text.lower() for words in _ABOUT_FORMAT):
        return ConfigurationError(
            f"{model} does not know structured output ({problem.text}); set structured to 'object' or 'text'"
        )
    if problem.status in (401, 403, 404):
        return ConfigurationError(
            f"{model} cannot be used ({problem.status}): {problem.text}; check model, api_base and key"
        )
    return problem


def _key(call: ModelCall) -> str | None:
    if not call.api_key_variable:
        # A server of one's own needs none, but the client insists on a word.
        return "none" if call.api_base else None
    key = os.environ.get(call.api_key_variable)
    if not key:
        raise ConfigurationError(
            f"the environment variable {shown_variable(call.api_key_variable)} that should hold the key is empty"
        )
    return key


def table_row(model: str) -> Mapping[str, Any]:
    """LiteLLM's row about a model: prices, context, abilities; {} when it has none."""
    litellm, _ = litellm_modules()
    for name in (model, model.partition("/")[2]):
        if name in litellm.model_cost:
            return dict(litellm.model_cost[name])
    return {}


def price_of(model: str) -> tuple[float, float] | None:
    """Dollars per million (prompt, sampled) tokens in LiteLLM's table; None where it has no such model."""
    litellm, _ = litellm_modules()
    for name in (model, model.partition("/")[2]):
        row = litellm.model_cost.get(name)
        if row and "input_cost_per_token" in row and "output_cost_per_token" in row:
            return float(row["input_cost_per_token"]) * 1e6, float(row["output_cost_per_token"]) * 1e6
    return None


def known_model(name: str) -> bool:
    """Whether LiteLLM has the model in its table, or its first part is one of its providers."""
    litellm, _ = litellm_modules()
    provider, slash, _rest = name.partition("/")
    return name in litellm.model_cost or (bool(slash) and provider in {str(p.value) for p in litellm.LlmProviders})


def lacks_tools(model: str) -> bool:
    """Whether LiteLLM knows the model and knows it to have no tool calling."""
    litellm, _ = litellm_modules()
    return bool(table_row(model)) and not litellm.supports_function_calling(model)


def missing_keys(model: str) -> list[str]:
    """Environment variables that LiteLLM would need for `model` and that are not set."""
    litellm, _ = litellm_modules()
    return [str(name) for name in litellm.validate_environment(model).get("missing_keys", [])]


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
