"""An API model as a policy: any model that LiteLLM reaches, by its native tool calling.

It gives no token ids, so it can be rolled out and evaluated, never trained. Instructions go into the system message,
tools are sent as schemas, and what the model calls comes back as parsed calls. Turns are tried again here, the cap on
spending is its client's; what still fails raises, and its episode is stored as the provider's error, never as a reward
of 0.

Not covered: reasoning texts are not sent back to the model, and nothing is streamed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.contract import Action, Environment, Message, ToolCall, canonical_json
from errors import ConfigurationError, ContextOverflow, ProviderError
from models.policy import PolicyIdentity
from models.providers.client import ModelClient
from models.providers.litellm_client import (
    CallFailed,
    Completion,
    ModelCall,
    encodable,
    explained,
    lacks_tools,
    missing_keys,
    table_row,
)
from models.providers.tries import WAITS, tried

logger = logging.getLogger("trace.models")

# Part of the policy's identity: how a conversation becomes a request.
RENDERING = "native-tools-1"
# What stands for the result of a call that the environment said nothing to.
NOT_ANSWERED = "(this call was not answered)"
PING = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Answers with the word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@dataclass(frozen=True)
class ChatSettings:
    """Which model, where, and how one turn is sampled. `context` (tokens) and `price` (dollars per million prompt and
    sampled tokens) are asked from LiteLLM's table when None."""

    model: str
    api_base: str = ""
    api_key_variable: str = ""
    adapter: str = ""
    temperature: float | None = 0.0
    max_tokens: int = 2048
    seconds: float = 180.0
    context: int | None = None
    price: tuple[float, float] | None = None


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

    def __init__(self, settings: ChatSettings, client: ModelClient) -> None:
        self.settings, self.client = settings, client
        self.answered_by: set[str] = set()
        self.stop = threading.Event()

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
        row = table_row(self.settings.model)
        return int(row["max_input_tokens"]) if row.get("max_input_tokens") else None

    def check(self) -> None:
        """Refuse, before any work, a model that LiteLLM knows to have no tools, a missing key, or a cap without a
        price; then ask the model to call a tool once. Raises `ConfigurationError`, or `ProviderError` when nobody
        answers."""
        s = self.settings
        if lacks_tools(s.model):
            raise ConfigurationError(
                f"{s.model} has no tool calling, says LiteLLM; an agent needs it, give another model"
            )
        if not s.api_base and not s.api_key_variable:
            missing = missing_keys(s.model)
            if missing:
                raise ConfigurationError(f"{s.model} needs {', '.join(missing)}; set it in the environment")
        self.client.cap.require_price(s.model, s.price)
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
        """Make no further call; safe to call again. The client belongs to whoever made it."""
        self.stop.set()

    def _turn(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], usage: Usage, **options: Any
    ) -> Action:
        """One turn, tried again while the failure may pass."""
        return tried(lambda: self._once(messages, tools, usage, options), self.settings.model, self.stop, WAITS)

    def _once(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        usage: Usage,
        options: Mapping[str, Any],
    ) -> Action:
        s = self.settings
        call = ModelCall(
            "policy", s.model, messages, tools, s.max_tokens, s.temperature, s.seconds, s.api_base, s.api_key_variable,
            s.price, options,
        )  # fmt: skip
        try:
            reply = self.client.complete(call)
        except CallFailed as problem:
            if problem.too_long:
                raise ContextOverflow(
                    f"{s.model}: the conversation is longer than its context: {problem.text[:300]}; "
                    "use a model with a longer context"
                ) from problem
            raise explained(problem, s.model) from problem.__cause__
        self.answered_by.add(reply.model)
        usage.calls += 1
        usage.prompt_tokens += reply.prompt_tokens
        usage.sampled_tokens += reply.sampled_tokens
        usage.truncated += reply.truncated
        return _action(s.model, reply)


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


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form of the chat protocol, where every call has an id and is answered by a result that names it.

    Calls without an id (worked examples) get one. A result that names no call of the turn answers the first that still
    has no answer, for an environment need not say which one it answers, and calls that it left out are said to be: a
    provider refuses a conversation without their results. A result behind which no call is open (to a turn that could
    not be read) becomes a user message: the protocol knows no such result."""
    said: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "tool" and unanswered:
            answered = message.tool_call_id if message.tool_call_id in unanswered else unanswered[0]
            unanswered.remove(answered)
            said.append(_result(answered, message.content))
            continue
        said += [_result(left, NOT_ANSWERED) for left in unanswered]
        unanswered = []
        if not message.tool_calls:
            said.append({"role": "user" if message.role == "tool" else message.role, "content": message.content})
            continue
        unanswered = [call.id or f"call_{place}_{index}" for index, call in enumerate(message.tool_calls)]
        written = [{"name": call.name, "arguments": json.dumps(dict(call.arguments))} for call in message.tool_calls]
        calls = [{"id": i, "type": "function", "function": f} for i, f in zip(unanswered, written, strict=True)]
        said.append({"role": "assistant", "content": message.content or None, "tool_calls": calls})
    return said + [_result(left, NOT_ANSWERED) for left in unanswered]


def _result(call: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


def _action(model: str, reply: Completion) -> Action:
    """The action of a reply. Arguments that are no JSON object make the whole turn malformed: the agent's mistake."""
    if not reply.finish:
        raise ProviderError(f"{model} gave no choice, or one that broke off", transient=True)
    content = (reply.content or reply.refusal).strip()
    if reply.finish == "content_filter" and not content:
        raise ProviderError(f"{model}: the provider's filter stopped the turn")
    calls = []
    for index, call in enumerate(reply.calls):
        try:
            arguments = json.loads(call.arguments)
            canonical_json([call.name, arguments]).encode()  # NaN and lone surrogates are not JSON that can be stored
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict) or not call.name:
            return Action(malformed=encodable(f"{call.name}({call.arguments})"))
        calls.append(ToolCall(call.name, arguments, encodable(call.id) or f"call_{index}"))
    if not calls and not content:
        return Action(malformed="(nothing)")
    return Action(content=content, tool_calls=tuple(calls))
