"""What a vLLM server's answers say: completions, and failures by what helps against them (`models/vllm/server.py`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeGuard

from errors import ConfigurationError, ContextOverflow, NotFinite, PolicyError, ProviderError

# The status for figures that are no numbers; a server that is broken has it, too.
CANNOT_SAY = 500
RETRIED = frozenset({408, 429, 500, 502, 503, 504})


class ServerAway(ProviderError):
    """No server answers at the address."""


class ModelMissing(ProviderError):
    """The server answers, but not under this name."""


class ServerSilent(ProviderError):
    """The server took the request and did not answer in time."""


class ServerFailed(ProviderError):
    """The server answered with a `status` that may go away by itself."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, transient=True)
        self.status = status


@dataclass(frozen=True)
class Completion:
    """What the server sampled: ids, their log-probabilities (nats), and whether it stopped by itself."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


def read_completion(url: str, model: str, answer: Mapping[str, Any]) -> Completion:
    """A server's answer to a request with `EXACT` for one completion by `model`. Raises `PolicyError` for another."""
    (choice,) = read_choices(url, model, 1, answer)
    told = choice.get("logprobs")
    ids, values = choice.get("token_ids"), told.get("token_logprobs") if isinstance(told, dict) else None
    if not _are(ids, int) or not _are(values, (float, int, NoneType)) or len(ids) != len(values) or not ids:
        raise PolicyError(
            f"{url} returned {ids!r:.60} with log-probabilities {values!r:.60}, not one for each token; "
            "a vLLM server of version 0.32 or later is needed"
        )
    logprobs = tuple(map(figure, values))
    if not all(map(math.isfinite, logprobs)):
        raise come_apart(url, model, f"log-probabilities {values!r:.60}")
    return Completion(tuple(ids), logprobs, choice.get("finish_reason") == "stop")


def come_apart(url: str, model: str, said: str) -> NotFinite:
    """The error for a model whose figures are no numbers; `said` is what the server answers."""
    return NotFinite(
        f"{model!r} gives log-probabilities that are not finite on {url} ({said}): its weights have come apart in the "
        "server's precision; train it again with a lower learning rate"
    )


def figure(value: float | None) -> float:
    """A log-probability; one that is no number may come as null."""
    return math.nan if value is None else float(value)


def read_choices(url: str, model: str, count: int, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    if answer.get("model") != model:  # a proxy in between may fall back silently
        raise ProviderError(
            f"{url} was asked for {model!r} and answered as {answer.get('model')!r}; "
            "point policy.url at the vLLM server itself"
        )
    choices = answer.get("choices")
    if not _are(choices, dict) or len(choices) != count:
        raise ProviderError(f"{url} gave {choices!r:.80} as choices, not {count}; a vLLM server is needed")
    return choices


def _are(values: Any, kinds: type | tuple[type, ...]) -> TypeGuard[list[Any]]:
    """Whether this is a list of such values."""
    return isinstance(values, list) and all(isinstance(value, kinds) for value in values)


def read_document(where: str, content: bytes) -> dict[str, Any]:
    """An answer's body, which should be JSON."""
    try:
        answer = json.loads(content)
    except ValueError as problem:
        raise ProviderError(
            f"{where} sent what is not JSON ({problem}); look at the server's log", transient=True
        ) from problem
    return answer if isinstance(answer, dict) else {"text": answer}


def refusal(where: str, status: int, text: str) -> PolicyError | ConfigurationError:
    """The error that an answer other than 200 stands for; `text` is its body."""
    said = _message(text)
    if status == 404:
        return ModelMissing(f"{where} answers 404: {said}; load the adapter, or correct the name")
    if status in (401, 403):
        return ConfigurationError(
            f"{where} answers {status}: {said}; name the variable that holds the key in policy.api_key_env"
        )
    if status in RETRIED:
        return ServerFailed(f"{where} answers {status}: {said}; look at the server's log", status)
    if "context length" in said or "max_model_len" in said or "got 0" in said:  # no room for one token
        return ContextOverflow(f"{where} answers {status}: {said}; start it with a larger --max-model-len")
    return PolicyError(f"{where} answers {status}: {said}; correct the request or the server's settings")


def _message(text: str) -> str:
    """What the server says went wrong, in at most 300 characters."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:300].strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return str(said)[:300]
