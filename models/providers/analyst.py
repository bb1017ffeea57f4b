"""The analyst: a language model that answers in a schema, within a budget, and is never paid twice for one question.

Every model goes through LiteLLM: an API, a vLLM server, or a provider of one's own. Around it stand the things that a
loop which runs at night needs: replies checked by pydantic with one attempt at repair, retries by class of error, a
deadline per call, bounded concurrency, a cache of replies in the database, spend per call, and caps that stop before
the call that would pass them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import tenacity
from pydantic import BaseModel, ValidationError

from environments.contract import content_hash
from errors import BudgetExceeded, ConfigurationError, ProviderError
from models.providers.litellm_client import Completion, complete, price_of

Reply = TypeVar("Reply", bound=BaseModel)


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


class ReplyCache(Protocol):
    """Replies by request hash: {request_hash, model, reply, prompt_tokens, completion_tokens, dollars}."""

    def get(self, request_hash: str) -> Mapping[str, Any] | None: ...
    def put(self, row: Mapping[str, Any]) -> None: ...


class SpendLog(Protocol):
    """What was spent: {id, round_id, stage, model, calls, prompt_tokens, sampled_tokens, dollars, seconds}."""

    def total(self, round_id: str) -> Mapping[str, float]: ...
    def add(self, row: Mapping[str, Any]) -> None: ...


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


@dataclass
class _Bill:
    """What one question has cost so far, over all its attempts."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    dollars: float = 0.0
    started: float = field(default_factory=time.monotonic)


class Analyst:
    """Asks one model on behalf of one round. Safe to use from any thread, also from inside an event loop."""

    def __init__(self, settings: AnalystSettings, round_id: str, cache: ReplyCache, spend: SpendLog) -> None:
        if not settings.model:
            raise ConfigurationError(
                "no model is configured for the analyst; set TRACE_ANALYST__MODEL (LiteLLM's name of a model) or use "
                "the analyst 'checks', which needs none"
            )
        self.settings, self.round_id, self._cache, self._spend = settings, round_id, cache, spend
        self._prices = price_of(settings.model, settings.prompt_price, settings.sampled_price)
        if settings.max_dollars and self._prices is None:
            raise ConfigurationError(
                f"the price of {settings.model!r} is unknown: a cap of {settings.max_dollars} dollars cannot hold; "
                "set prompt_price and sampled_price (dollars per million tokens), 0 for your own server"
            )
        before = spend.total(round_id)
        self._calls, self._dollars = int(before["calls"]), float(before["dollars"])
        self._tokens = int(before["prompt_tokens"] + before["sampled_tokens"])
        # One loop for the analyst's life: LiteLLM keeps connections per loop.
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._thread = threading.Thread(target=self._loop.run_forever, name="analyst", daemon=True)
        self._thread.start()

    def ask(self, question: Question[Reply]) -> Answer[Reply]:
        """The checked answer.

        Raises `BudgetExceeded` before a call that may pass a cap, `ProviderError` when the model fails, refuses, or is
        still wrong after one repair (`transient` when asking later may help), `ConfigurationError` when the server
        does not know structured output.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(question), self._loop).result()

    def ask_many(self, questions: Sequence[Question[Reply]]) -> list[Answer[Reply] | ProviderError]:
        """All answers in order, `concurrency` at a time; a question whose model failed has its error in its place.

        Raises the other errors of `ask`, after everything that was under way has ended and is in the cache.
        """
        found = asyncio.run_coroutine_threadsafe(self._gather(questions), self._loop).result()
        for result in found:
            if isinstance(result, BaseException) and not isinstance(result, ProviderError):
                raise result
        return [result for result in found if isinstance(result, Answer | ProviderError)]

    def request_hash(self, question: Question[Any]) -> str:
        """What makes two requests the same: model, messages, schema, temperature, length, sample."""
        asked = [list(map(dict, question.messages)), _json_schema(question.schema)]
        how = [self.settings.model, self.settings.max_tokens, question.temperature, question.sample]
        return content_hash([*asked, *how], 32)

    def close(self) -> None:
        """Stop the analyst's thread; safe to call again."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
            self._loop.close()

    async def _gather(self, questions: Sequence[Question[Reply]]) -> list[Any]:
        return list(await asyncio.gather(*(self._ask(question) for question in questions), return_exceptions=True))

    async def _ask(self, question: Question[Reply]) -> Answer[Reply]:
        request_hash = self.request_hash(question)
        async with self._slots:
            row = await asyncio.to_thread(self._cache.get, request_hash)
            kept = None if row is None else _kept(question, row)
            if kept is not None:
                return Answer(kept, request_hash, True)
            bill = _Bill()
            try:
                value, content = await self._answer_or_repair(question, bill)
            finally:
                if bill.calls:
                    await asyncio.to_thread(self._spend.add, self._spend_row(question.stage, bill))
            await asyncio.to_thread(self._cache.put, self._reply_row(request_hash, {"content": content}, bill))
            return Answer(value, request_hash, False)

    async def _answer_or_repair(self, question: Question[Reply], bill: _Bill) -> tuple[Reply, str]:
        messages = self._with_schema(question)
        reply = await self._call(messages, question, bill)
        try:
            return _checked(question, reply), reply.content
        except ValueError as error:
            wrong = _what_is_wrong(error, reply, self.settings.max_tokens)
        said = [] if not reply.content else [{"role": "assistant", "content": reply.content}]
        asked = f"That was not usable: {wrong}\nAnswer again, whole and corrected, with the JSON object only."
        repaired = await self._call([*messages, *said, {"role": "user", "content": asked}], question, bill)
        try:
            return _checked(question, repaired), repaired.content
        except ValueError as error:
            wrong = _what_is_wrong(error, repaired, self.settings.max_tokens)
            raise ProviderError(f"{self.settings.model} gave no usable answer, also when told why: {wrong}") from error

    async def _call(self, messages: list[dict[str, str]], question: Question[Any], bill: _Bill) -> Completion:
        """One completion with retries; each attempt is reserved against the caps before it is made."""
        settings = self.settings
        ends = time.monotonic() + settings.deadline_seconds
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, ProviderError) and e.transient),
            wait=_wait(settings.backoff_seconds),
            stop=tenacity.stop_after_attempt(settings.attempts) | tenacity.stop_before_delay(settings.deadline_seconds),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                left = ends - time.monotonic()
                if left <= 0:
                    raise ProviderError(
                        f"{settings.model} passed its deadline of {settings.deadline_seconds:g} s", transient=True
                    )
                return await self._attempt(messages, question, bill, left)
        raise AssertionError("tenacity ends by returning or raising")

    async def _attempt(
        self, messages: list[dict[str, str]], question: Question[Any], bill: _Bill, seconds: float
    ) -> Completion:
        settings = self.settings
        most_prompt = sum(most_tokens(message["content"]) for message in messages) + 16 * len(messages)
        tokens, dollars = most_prompt + settings.max_tokens, self._cost(most_prompt, settings.max_tokens)
        self._reserve(tokens, dollars)
        bill.calls += 1
        used = (0, 0.0)
        warmth = question.temperature if settings.send_temperature else None
        try:
            reply = await complete(settings, messages, schema=question.schema, temperature=warmth, seconds=seconds)
            cost = self._cost(reply.prompt_tokens, reply.sampled_tokens)
            used = (reply.prompt_tokens + reply.sampled_tokens, cost)
            bill.prompt_tokens += reply.prompt_tokens
            bill.sampled_tokens += reply.sampled_tokens
            bill.dollars += cost
        finally:
            self._tokens += used[0] - tokens
            self._dollars += used[1] - dollars
        if reply.refusal:
            raise ProviderError(f"{settings.model} refused to answer: {reply.refusal[:300]}")
        return reply

    def _reserve(self, tokens: int, dollars: float) -> None:
        settings = self.settings
        for what, spent, more, cap in (
            ("calls", self._calls, 1, settings.max_calls),
            ("tokens", self._tokens, tokens, settings.max_total_tokens),
            ("dollars", self._dollars, dollars, settings.max_dollars),
        ):
            if cap and spent + more > cap:
                raise BudgetExceeded(
                    f"the next call may bring the round's {what} to {spent + more:.6g}, over the cap of {cap:.6g} "
                    f"({spent:.6g} spent or under way); raise the cap and run again: what was answered is kept"
                )
        self._calls, self._tokens, self._dollars = self._calls + 1, self._tokens + tokens, self._dollars + dollars

    def _cost(self, prompt_tokens: int, sampled_tokens: int) -> float:
        prompt_price, sampled_price = self._prices or (0.0, 0.0)
        return (prompt_tokens * prompt_price + sampled_tokens * sampled_price) / 1e6

    def _with_schema(self, question: Question[Any]) -> list[dict[str, str]]:
        messages = [dict(message) for message in question.messages]
        if self.settings.structured != "schema":
            schema = json.dumps(_json_schema(question.schema), ensure_ascii=False)
            messages.append({"role": "user", "content": f"Answer with one JSON object of this JSON schema:\n{schema}"})
        return messages

    def _spend_row(self, stage: str, bill: _Bill) -> dict[str, Any]:
        # A payment is unique by having been made: a hash of its content would merge two of them.
        return {
            "id": uuid.uuid4().hex[:16],
            "round_id": self.round_id,
            "stage": stage,
            "model": self.settings.model,
            "calls": bill.calls,
            "prompt_tokens": bill.prompt_tokens,
            "sampled_tokens": bill.sampled_tokens,
            "dollars": bill.dollars,
            "seconds": time.monotonic() - bill.started,
        }

    def _reply_row(self, request_hash: str, reply: Mapping[str, Any], bill: _Bill) -> dict[str, Any]:
        return {
            "request_hash": request_hash,
            "model": self.settings.model,
            "reply": dict(reply),
            "prompt_tokens": bill.prompt_tokens,
            "completion_tokens": bill.sampled_tokens,
            "dollars": bill.dollars,
        }


async def _cancel_others() -> None:
    """End what runs in this loop besides: LiteLLM leaves a logging task behind that a closed loop would break."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# A memory of the process is right here: a class has one schema, whatever round asks for it.
_SCHEMAS: dict[type[BaseModel], dict[str, Any]] = {}


def _json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """The schema as JSON, made once per class: it is part of every request's hash."""
    if schema not in _SCHEMAS:
        _SCHEMAS[schema] = schema.model_json_schema()
    return _SCHEMAS[schema]


def most_tokens(text: str) -> int:
    """An upper estimate of a text's tokens: a token per two ASCII characters and per byte of any other."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    return ascii_characters // 2 + len(text.encode("utf-8", "replace")) - ascii_characters + 1


def _wait(first: float) -> Callable[[tenacity.RetryCallState], float]:
    """Exponential with jitter, or what the provider asked for."""
    exponential = tenacity.wait_exponential_jitter(initial=first, max=60, jitter=first)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(exponential(state), float(getattr(error, "retry_after", 0.0) or 0.0))

    return wait


def _kept(question: Question[Reply], row: Mapping[str, Any]) -> Reply | None:
    """The cached reply, or None when today's check of the question would not let it pass."""
    try:
        return _parse(question, str(row["reply"]["content"]))
    except ValueError:
        return None


def _checked(question: Question[Reply], reply: Completion) -> Reply:
    if reply.truncated:
        raise ValueError("the reply was cut off")
    return _parse(question, reply.content)


def _parse(question: Question[Reply], content: str) -> Reply:
    text = content.strip()
    if text.startswith("```"):
        text = text.removeprefix("```json").removeprefix("```").removesuffix("```")
    value = question.schema.model_validate_json(text)
    if question.check is not None:
        question.check(value)
    return value


def _what_is_wrong(error: ValueError, reply: Completion, max_tokens: int) -> str:
    if reply.truncated:
        return f"the reply was cut off after {max_tokens} tokens; be shorter."
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'reply'}: {e['msg']}" for e in error.errors()[:5])
    return str(error)[:1000]
