"""The analyst: a language model that answers in a schema, within a budget, and is never paid twice for one question.

Around a call of the client (`models.providers.client`) stand the things that a loop which runs at night needs: replies
checked by pydantic with one attempt at repair, retries by class of error, a deadline per call, bounded concurrency, and
a cache of replies in the database. The cap that stops before the call that would pass it is the client's.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import tenacity
from pydantic import BaseModel, ValidationError

from db import ReplyRow
from environments.contract import content_hash
from errors import ConfigurationError, ProviderError
from models.providers.client import ModelClient
from models.providers.litellm_client import CallFailed, Completion, ModelCall, explained, price_of
from models.providers.spending import Limits, Spent

Reply = TypeVar("Reply", bound=BaseModel)
_FENCE = "```"
_OPENING = re.compile(r"\s*```\w*\s*")


@dataclass(frozen=True)
class AnalystSettings:
    """How the analyst is reached and what it may cost. A cap of 0 is no cap; caps hold for a round.

    `model` is LiteLLM's name ("openai/...", "hosted_vllm/..."), `api_key_variable` names the environment variable with
    the key. `structured` is how a schema is asked for: "schema" (the server enforces it), "object" (JSON mode) or
    "text" (the schema stands in the prompt), for servers that know no more. Prices are dollars per million tokens;
    None takes LiteLLM's table. `send_temperature` is off for models that take none.
    """

    model: str = ""
    api_base: str = ""
    api_key_variable: str = ""
    structured: Literal["schema", "object", "text"] = "schema"
    max_tokens: int = 4096
    deadline_seconds: float = 120.0
    attempts: int = 5
    backoff_seconds: float = 1.0
    concurrency: int = 4
    max_calls: int = 0
    max_total_tokens: int = 0
    max_dollars: float = 0.0
    prompt_price: float | None = None
    sampled_price: float | None = None
    send_temperature: bool = True

    @property
    def limits(self) -> Limits:
        """The caps, in the form of the client's cap."""
        return Limits(self.max_calls or None, self.max_total_tokens or None, self.max_dollars or None)

    @property
    def price(self) -> tuple[float, float] | None:
        """Dollars per million (prompt, sampled) tokens as given; None where LiteLLM's table decides, which also knows
        what cached tokens cost."""
        if self.prompt_price is None or self.sampled_price is None:
            return None
        return self.prompt_price, self.sampled_price


class Refused(ProviderError):
    """This request is refused for good: by the model, by a filter of its provider, or as longer than its context. It
    says nothing of others, which may be answered."""


def unanswered(problem: ProviderError) -> bool:
    """Whether the call failed (an outage, a limit, a bill that is not paid), so that the same question may be answered
    later. Else the model has answered: with a refusal (`Refused`), or with what cannot be used."""
    return problem.transient or isinstance(problem, CallFailed)


class ReplyCache(Protocol):
    """Replies by request hash."""

    def get(self, request_hash: str) -> ReplyRow | None: ...
    def put(self, row: ReplyRow) -> None: ...


@dataclass(frozen=True)
class Question(Generic[Reply]):
    """One request. `sample` tells repeated draws of the same question apart; `check` may raise `ValueError` with what
    is wrong with an answer that fits the schema, and the model is told."""

    stage: str
    messages: Sequence[Mapping[str, str]]
    schema: type[Reply]
    temperature: float = 0.0
    sample: int = 0
    check: Callable[[Reply], None] | None = None


@dataclass(frozen=True)
class Answer(Generic[Reply]):
    """A checked reply, the hash of the request that it answers, and whether it was in the cache."""

    value: Reply
    request_hash: str
    cached: bool


class Analyst:
    """Asks one model through a client. Safe to use from any thread, also from inside an event loop.

    `moved` is called for each answer of `ask_many`, in its caller's thread: many questions may take hours, and whoever
    watches this process for a hang sees that it works.
    """

    def __init__(
        self,
        settings: AnalystSettings,
        client: ModelClient,
        cache: ReplyCache,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        if not settings.model:
            raise ConfigurationError(
                "no model is configured for the analyst; set TRACE_ANALYST__MODEL (LiteLLM's name of a model) or use "
                "the analyst 'checks', which needs none"
            )
        self.settings, self.client, self._cache, self._moved = settings, client, cache, moved
        if settings.max_dollars and settings.price is None and price_of(settings.model) is None:
            raise ConfigurationError(
                f"the price of {settings.model!r} is unknown: a cap of {settings.max_dollars} dollars cannot hold; "
                "set prompt_price and sampled_price (dollars per million tokens), 0 for your own server"
            )
        self._slots = threading.BoundedSemaphore(settings.concurrency)
        self._stop = threading.Event()

    def ask(self, question: Question[Reply]) -> Answer[Reply]:
        """The checked answer.

        Raises `BudgetExceeded` before a call that may pass a cap, `ProviderError` when the model fails, refuses
        (`Refused`), or is still wrong after one repair (`unanswered` tells when asking later may help, `transient` when
        soon), `ConfigurationError` when the server does not know structured output.
        """
        request_hash = self.request_hash(question)
        with self._slots:
            row = self._cache.get(request_hash)
            kept = None if row is None else _kept(question, row)
            if kept is not None:
                return Answer(kept, request_hash, True)
            cost = Spent()
            value, content = self._answer_or_repair(question, cost)
            self._cache.put(self._reply_row(request_hash, {"content": content, "stage": question.stage}, cost))
            return Answer(value, request_hash, False)

    def ask_many(self, questions: Sequence[Question[Reply]]) -> list[Answer[Reply] | ProviderError]:
        """All answers in order, `concurrency` at a time; a question whose model failed has its error in its place.

        Raises the other errors of `ask`, after everything that was under way has ended and is in the cache.
        """
        pool, found = ThreadPoolExecutor(self.settings.concurrency, "analyst"), list[Answer[Reply] | Exception]()
        try:
            for result in pool.map(self._ask_or_error, questions):
                found.append(result)
                if isinstance(result, Answer):
                    self._moved()
        except BaseException:  # the user stops it: what is under way ends at its next wait, the rest is not asked
            self.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        for result in found:
            if isinstance(result, Exception) and not isinstance(result, ProviderError):
                raise result
        return [result for result in found if isinstance(result, Answer | ProviderError)]

    def request_hash(self, question: Question[Any]) -> str:
        """What makes two requests the same: model, messages, schema, temperature, length, sample."""
        asked = [list(map(dict, question.messages)), _json_schema(question.schema)]
        how = [self.settings.model, self.settings.max_tokens, question.temperature, question.sample]
        return content_hash([*asked, *how], 32)

    def close(self) -> None:
        """Ask nothing more; safe to call again. The client belongs to whoever made it."""
        self._stop.set()

    def _ask_or_error(self, question: Question[Reply]) -> Answer[Reply] | Exception:
        try:
            return self.ask(question)
        except Exception as error:  # every other question is asked all the same
            return error

    def _answer_or_repair(self, question: Question[Reply], cost: Spent) -> tuple[Reply, str]:
        messages = self._with_schema(question)
        reply = self._call(messages, question, cost)
        try:
            return _checked(question, reply), reply.content
        except ValueError as error:
            wrong = _what_is_wrong(error, reply, self.settings.max_tokens)
        said = [] if not reply.content else [{"role": "assistant", "content": reply.content}]
        asked = f"That was not usable: {wrong}\nAnswer again, whole and corrected, with the JSON object only."
        repaired = self._call([*messages, *said, {"role": "user", "content": asked}], question, cost)
        try:
            return _checked(question, repaired), repaired.content
        except ValueError as error:
            wrong = _what_is_wrong(error, repaired, self.settings.max_tokens)
            raise ProviderError(f"{self.settings.model} gave no usable answer, also when told why: {wrong}") from error

    def _call(self, messages: list[dict[str, str]], question: Question[Any], cost: Spent) -> Completion:
        """One completion with retries; each attempt is a call of the client, reserved before it is made."""
        settings = self.settings
        ends = time.monotonic() + settings.deadline_seconds
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, ProviderError) and e.transient),
            wait=_wait(settings.backoff_seconds),
            stop=tenacity.stop_after_attempt(settings.attempts) | tenacity.stop_before_delay(settings.deadline_seconds),
            sleep=self._pause,
            reraise=True,
        )
        for attempt in retrying:
            with attempt:
                left = ends - time.monotonic()
                if left <= 0:
                    raise ProviderError(
                        f"{settings.model} passed its deadline of {settings.deadline_seconds:g} s", transient=True
                    )
                return self._attempt(messages, question, cost, left)
        raise AssertionError("tenacity ends by returning or raising")

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _attempt(
        self, messages: list[dict[str, str]], question: Question[Any], cost: Spent, seconds: float
    ) -> Completion:
        s = self.settings
        if self._stop.is_set():
            text = "stopped before the call; run again"
            raise CallFailed(f"{s.model}: {text}", text, transient=False)
        warmth = question.temperature if s.send_temperature else None
        call = ModelCall(
            question.stage, s.model, messages, (), s.max_tokens, warmth, seconds, s.api_base, s.api_key_variable,
            s.price, _response_format(s.structured, question.schema),
        )  # fmt: skip
        try:
            reply = self.client.complete(call)
        except CallFailed as problem:
            if problem.too_long or problem.filtered:
                raise Refused(str(problem)) from problem.__cause__
            if problem.late:
                advice = f"a reply may have {s.max_tokens} tokens, so raise analyst.deadline_seconds for a slow model"
                raise CallFailed(f"{problem}; {advice}", problem.text, transient=True) from problem.__cause__
            raise explained(problem, s.model, s.structured != "text") from problem.__cause__
        cost.add(Spent(1, reply.prompt_tokens, reply.sampled_tokens, reply.dollars))
        if not reply.finish:
            raise ProviderError(f"{s.model} gave no choice, or one that broke off", transient=True)
        refusal = reply.refusal or ("the provider's filter stopped it" if reply.finish == "content_filter" else "")
        if refusal:
            raise Refused(f"{s.model} refused to answer: {refusal[:300]}")
        return reply

    def _with_schema(self, question: Question[Any]) -> list[dict[str, str]]:
        messages = [dict(message) for message in question.messages]
        if self.settings.structured != "schema":
            schema = json.dumps(_json_schema(question.schema), ensure_ascii=False)
            messages.append({"role": "user", "content": f"Answer with one JSON object of this JSON schema:\n{schema}"})
        return messages

    def _reply_row(self, request_hash: str, reply: Mapping[str, Any], cost: Spent) -> ReplyRow:
        return ReplyRow(
            request_hash=request_hash,
            model=self.settings.model,
            reply=dict(reply),
            prompt_tokens=cost.prompt_tokens,
            completion_tokens=cost.sampled_tokens,
            dollars=cost.dollars,
        )


# A memory of the process is right here: a class has one schema, whatever round asks for it.
_SCHEMAS: dict[type[BaseModel], dict[str, Any]] = {}


def _json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """The schema as JSON, made once per class: it is part of every request's hash."""
    if schema not in _SCHEMAS:
        _SCHEMAS[schema] = schema.model_json_schema()
    return _SCHEMAS[schema]


def _response_format(structured: str, schema: type[BaseModel]) -> dict[str, Any]:
    """How the server is asked to hold the reply to the schema; {} where the prompt alone says so."""
    if structured == "schema":
        described = {"name": schema.__name__, "schema": _strict(_json_schema(schema)), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    return {"response_format": {"type": "json_object"}} if structured == "object" else {}


# What strict modes of providers refuse in a schema; pydantic holds the reply to it all the same.
_NOT_STRICT = {
    "default", "format", "pattern", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties",
}  # fmt: skip
# Keys under which names of our own stand, which may be any word.
_NAMED = ("properties", "$defs")


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as strict servers want it: no further properties, every property required, and no bounds."""
    if schema.get("type") == "object" and "properties" in schema:
        schema = schema | {"additionalProperties": False, "required": list(schema["properties"])}
    return {
        key: {name: _strict_part(part) for name, part in value.items()} if key in _NAMED else _strict_part(value)
        for key, value in schema.items()
        if key not in _NOT_STRICT
    }


def _strict_part(value: Any) -> Any:
    if isinstance(value, dict):
        return _strict(value)
    return [_strict_part(part) for part in value] if isinstance(value, list) else value


def _wait(first: float) -> Callable[[tenacity.RetryCallState], float]:
    """Exponential with jitter, or what the provider asked for."""
    exponential = tenacity.wait_exponential_jitter(initial=first, max=60, jitter=first)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(exponential(state), float(getattr(error, "retry_after", 0.0) or 0.0))

    return wait


def _kept(question: Question[Reply], row: ReplyRow) -> Reply | None:
    """The cached reply, or None when today's check of the question would not let it pass."""
    try:
        return _parse(question, str(row.reply["content"]))
    except ValueError:
        return None


def _checked(question: Question[Reply], reply: Completion) -> Reply:
    if reply.truncated:
        raise ValueError("the reply was cut off")
    return _parse(question, reply.content)


def _parse(question: Question[Reply], content: str) -> Reply:
    value = question.schema.model_validate_json(unfenced(content))
    if question.check is not None:
        question.check(value)
    return value


def unfenced(text: str) -> str:
    """The text without the fence that a model may put around the whole of it, with the name of a language or without;
    any other text as it is."""
    opening = _OPENING.match(text)
    if opening is None:
        return text
    # No pattern for what is between: a run of blanks, which models may fall into, costs one the square of its length.
    return text[opening.end() :].rstrip().removesuffix(_FENCE)


def _what_is_wrong(error: ValueError, reply: Completion, max_tokens: int) -> str:
    if reply.truncated:
        return f"the reply was cut off after {max_tokens} tokens; be shorter."
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'reply'}: {e['msg']}" for e in error.errors()[:5])
    return str(error)[:1000]
