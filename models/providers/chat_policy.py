"""An API model as a policy: any model that LiteLLM reaches, by its native tool calling.

It gives no token ids, so it can be rolled out and evaluated, never trained. Instructions go into the system message,
tools are sent as schemas, and what the model calls comes back as parsed calls. Retries, the deadline of a call and the
money cap are here; what still fails raises, and its episode is stored as the provider's error, never as a reward of 0.

Not covered: reasoning texts are not sent back to the model, and nothing is streamed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from environments.contract import Action, Environment, Message, ToolCall, canonical_json
from errors import ConfigurationError, ContextOverflow, ProviderError
from models.policy import PolicyIdentity
from models.providers.litellm_client import SlowDown, classified, key_of, litellm_modules
from models.providers.spending import SpendingCap, most_tokens

logger = logging.getLogger("trace.models")

# Part of the policy's identity: how a conversation becomes a request.
RENDERING = "native-tools-1"
WAITS = (2.0, 8.0, 30.0)
PING = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Answers with the word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_ABOUT_CONTEXT = ("context length", "context window", "maximum context", "too many tokens", "prompt is too long")


@dataclass(frozen=True)
class ChatSettings:
    """Which model, where, and how one turn is sampled. `context` (tokens) and `price` (dollars per million prompt and
    sampled tokens) are asked from LiteLLM's table when None. `structured` is what `models.providers.litellm_client`
    asks about."""

    model: str
    api_base: str = ""
    api_key_variable: str = ""
    adapter: str = ""
    temperature: float | None = 0.0
    max_tokens: int = 2048
    seconds: float = 180.0
    context: int | None = None
    price: tuple[float, float] | None = None
    structured: Literal["schema", "object", "text"] = "text"

    @property
    def send_temperature(self) -> bool:
        return self.temperature is not None


@dataclass
class Usage:
    """What the turns of one episode took. `truncated` turns ended at the token limit."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    truncated: int = 0


class ChatPolicy:
    """A message policy (`models.policy`) on an API model; safe to use from several threads, one `ChatTurns` each.

    `stop` makes everything under way end at its next wait. `answered_by` collects the names that the provider gave."""

    def __init__(self, settings: ChatSettings, purse: SpendingCap | None = None) -> None:
        self.settings, self.purse = settings, purse or SpendingCap()
        self.answered_by: set[str] = set()
        self.stop = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
        self._thread.start()

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        """Model name and address: what is behind them is the provider's to change."""
        s = self.settings
        return PolicyIdentity(s.model, s.api_base or "provider", "", s.adapter, RENDERING)

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        """One turn, not counted by episode; see `ChatTurns.act`."""
        return ChatTurns(self).act(environment, messages, seed)

    @property
    def context(self) -> int | None:
        """The longest prompt in tokens, where it is known."""
        if self.settings.context is not None:
            return self.settings.context
        row = _table_row(self.settings.model)
        return int(row["max_input_tokens"]) if row.get("max_input_tokens") else None

    def check(self) -> None:
        """Refuse, before any work, a model that LiteLLM knows to have no tools, a missing key, or a cap without a
        price; then ask the model to call a tool once. Raises `ConfigurationError`, or `ProviderError` when nobody
        answers."""
        s = self.settings
        litellm, _ = litellm_modules()
        if _table_row(s.model) and not litellm.supports_function_calling(s.model):
            raise ConfigurationError(
                f"{s.model} has no tool calling, says LiteLLM; an agent needs it, give another model"
            )
        if not s.api_base and not s.api_key_variable:
            missing = missing_keys(s.model)
            if missing:
                raise ConfigurationError(f"{s.model} needs {', '.join(missing)}; set it in the environment")
        self.purse.require_price(s.model, s.price)
        asked = [{"role": "user", "content": "Call the tool ping with the word pong. Answer with the call only."}]
        try:
            called = self._turn(asked, [PING], Usage()).tool_calls or self._forced(asked)
        except ProviderError as problem:
            if problem.transient:
                raise
            raise ConfigurationError(
                f"{s.model} refused a request with one tool: {problem}; give a model (or start the server) with tool "
                "calling, for vLLM with --enable-auto-tool-choice and --tool-call-parser"
            ) from problem
        if called is not None and not called:
            raise ConfigurationError(
                f"{s.model} answered in words when asked to call a tool: no native tool calling; give another model, "
                "or start the server with a tool parser (vLLM: --enable-auto-tool-choice --tool-call-parser NAME)"
            )

    def _forced(self, asked: list[dict[str, Any]]) -> Sequence[ToolCall] | None:
        """The calls of an answer that must call; None from a server that takes tools but forces nobody to use them, as
        a gateway in front of a model that calls only what it has seen called."""
        try:
            return self._turn(asked, [PING], Usage(), tool_choice="required").tool_calls
        except ProviderError as problem:
            if problem.transient or "tool_choice" not in str(problem):
                raise
            logger.warning(
                "%s takes tools but cannot be made to call one: whether it calls them, its results will show",
                self.settings.model,
            )
            return None

    def close(self) -> None:
        """Stop the policy's thread; safe to call again."""
        self.stop.set()
        if self._thread.is_alive():
            # LiteLLM leaves a logging task on the loop that it ran in.
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=30)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
            if not self._thread.is_alive():
                self._loop.close()

    def _turn(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], usage: Usage, **options: Any
    ) -> Action:
        """One turn, tried again while the failure may pass."""
        for wait in (*WAITS, None):
            if self.stop.is_set():
                break
            try:
                return self._once(messages, tools, usage, options)
            except ProviderError as problem:
                if wait is None or not problem.transient:
                    raise
                asked = problem.retry_after if isinstance(problem, SlowDown) else 0.0
                self.stop.wait(min(120.0, max(wait, asked)))
        raise ProviderError(
            f"{self.settings.model}: stopped before the call; run the same command again", transient=True
        )

    def _once(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        usage: Usage,
        options: Mapping[str, Any],
    ) -> Action:
        s = self.settings
        with self.purse.call(s.model, most_tokens(messages, tools), s.max_tokens, s.price) as charge:
            asked = self._complete(messages, tools, options)
            try:
                response = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
            except TimeoutError as problem:
                raise ProviderError(f"{s.model} did not answer within {s.seconds:g} s", transient=True) from problem
            charge(response)
        self.answered_by.add(str(getattr(response, "model", "") or s.model))
        counted = getattr(response, "usage", None)
        usage.calls += 1
        usage.prompt_tokens += int(getattr(counted, "prompt_tokens", 0) or 0)
        usage.sampled_tokens += int(getattr(counted, "completion_tokens", 0) or 0)
        if not response.choices:
            raise ProviderError(f"{s.model} answered without a choice", transient=True)
        choice = response.choices[0]
        usage.truncated += choice.finish_reason == "length"
        return _action(s.model, choice)

    async def _complete(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Any:
        s = self.settings
        litellm, openai = litellm_modules()
        given: dict[str, Any] = {"tools": [dict(t) for t in tools], **options} if tools else {}
        if s.temperature is not None:
            given["temperature"] = s.temperature
        if s.api_base:
            given["api_base"] = s.api_base
        call = litellm.acompletion(
            model=s.model, messages=messages, max_tokens=s.max_tokens, timeout=s.seconds, api_key=key_of(s),
            num_retries=0, max_retries=0, **given,
        )  # fmt: skip
        try:
            # LiteLLM's own time-out is per read: a server that trickles would pass any deadline.
            return await asyncio.wait_for(call, s.seconds)
        except openai.OpenAIError as problem:
            raise self._failure(problem) from problem

    def _failure(self, problem: Any) -> Exception:
        litellm, _ = litellm_modules()
        text = str(problem)
        long = isinstance(problem, litellm.ContextWindowExceededError) or (
            getattr(problem, "status_code", None) == 400 and any(w in text.lower() for w in _ABOUT_CONTEXT)
        )
        if long:
            return ContextOverflow(
                f"{self.settings.model}: the conversation is longer than its context: {text[:300]}; "
                "use a model with a longer context"
            )
        return classified(self.settings, problem)


class ChatTurns:
    """The turns of one episode on a `ChatPolicy`; `usage` and `seconds` (waiting for the model) are theirs alone."""

    def __init__(self, policy: ChatPolicy) -> None:
        self.policy, self.usage, self.seconds = policy, Usage(), 0.0

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return self.policy.identity(adapter)

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        """The model's next turn. Raises `ProviderError`, `ContextOverflow`, `ConfigurationError` (key or model refused)
        and `BudgetExceeded`. `seed` is not sent: few providers take one."""
        since = time.perf_counter()
        said = openai_messages([Message("system", environment.instructions), *environment.examples, *messages])
        try:
            return self.policy._turn(said, environment.tools, self.usage)
        finally:
            self.seconds += time.perf_counter() - since


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def missing_keys(model: str) -> list[str]:
    """Environment variables that LiteLLM would need for `model` and that are not set."""
    litellm, _ = litellm_modules()
    return [str(name) for name in litellm.validate_environment(model).get("missing_keys", [])]


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form of the chat protocol, where every call has an id and every result names its call.

    Calls without an id (worked examples) get one, and results without one answer them in order. A result that answers
    no call at all (to a turn that could not be read) becomes a user message: the protocol knows no such result."""
    said: list[dict[str, Any]] = []
    unnamed: list[str] = []
    for place, message in enumerate(messages):
        if message.tool_calls:
            ids = [call.id or f"call_{place}_{index}" for index, call in enumerate(message.tool_calls)]
            unnamed = [i for i, call in zip(ids, message.tool_calls, strict=True) if not call.id]
            calls = [
                {
                    "id": i,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for i, call in zip(ids, message.tool_calls, strict=True)
            ]
            said.append({"role": "assistant", "content": message.content or None, "tool_calls": calls})
        elif message.role == "tool" and (message.tool_call_id or unnamed):
            answered = message.tool_call_id or unnamed.pop(0)
            said.append({"role": "tool", "tool_call_id": answered, "content": message.content})
        else:
            said.append({"role": "user" if message.role == "tool" else message.role, "content": message.content})
    return said


def _action(model: str, choice: Any) -> Action:
    """The action of a reply. Arguments that are no JSON object make the whole turn malformed: the agent's mistake."""
    message = choice.message
    content = (message.content or getattr(message, "refusal", None) or "").strip()
    if choice.finish_reason == "content_filter" and not content:
        raise ProviderError(f"{model}: the provider's filter stopped the turn")
    calls = []
    for index, item in enumerate(message.tool_calls or ()):
        name, text = str(item.function.name or ""), item.function.arguments or "{}"
        try:
            arguments = json.loads(text)
            canonical_json(arguments).encode()  # NaN and lone surrogates are not JSON that can be stored
        except (ValueError, RecursionError):
            return Action(malformed=f"{name}({text})")
        if not isinstance(arguments, dict) or not name:
            return Action(malformed=f"{name}({text})")
        calls.append(ToolCall(name, arguments, str(item.id or f"call_{index}")))
    if not calls and not content:
        return Action(malformed="(nothing)")
    return Action(content=content.encode("utf-8", "replace").decode(), tool_calls=tuple(calls))


def _table_row(model: str) -> Mapping[str, Any]:
    """LiteLLM's row about a model, {} when it has none."""
    litellm, _ = litellm_modules()
    for name in (model, model.partition("/")[2]):
        if name in litellm.model_cost:
            return dict(litellm.model_cost[name])
    return {}
