"""Routing for a server: one decision a conversation, kept for as long as the conversation is known.

The router sees what it was fitted on: the conversation's first words from the user, behind the target's own
instructions and examples, whatever instructions a client sends. So that part of the prompt is computed once for all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from environments.contract import Message, Prompt
from errors import ProviderError
from models.renderer import Renderer
from models.router.first_observation import Opening, opening_of
from models.router.router import RouteDecision, Router
from models.serving.fleet.releases import Generation
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import ROLES, ChatRequest, text_of
from models.serving.upstreams.local_engine import LocalEngine

logger = logging.getLogger("trace.gateway")
# What of a request's own tokens the router reads: time and memory of one decision are bounded.
MOST_TOKENS = 256
MOST_CHARACTERS = 4 * MOST_TOKENS
CONVERSATIONS = 10_000


@dataclass(frozen=True)
class Routed:
    """What was decided for a conversation, by the router and for the adapter (served name, "" for the base) of one
    release (0: the base alone). `name` says who it is for clients."""

    name: str
    decision: RouteDecision
    router: str = ""
    release: int = 0
    adapter: str = ""

    def holds(self, generation: Generation, fresh: bool) -> bool:
        """Whether the route still stands. When another release is served, a conversation goes on with its adapter while
        that is in the new one too; all others, and those that are about to begin (`fresh`), are routed anew."""
        if self.release == generation.number:
            return True
        return bool(self.adapter) and not fresh and self.adapter in generation.members.values()


def first_words(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the first user messages, up to the first answer; bounded."""
    words: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "user":
            content = message.get("content")
            texts = (
                [p for p in content if isinstance(p, dict) and p.get("type") == "text"]
                if isinstance(content, list)
                else content
            )
            words.append(text_of(texts, f"messages[{index}].content"))
        elif words:
            break
    return "\n".join(words)[:MOST_CHARACTERS]


def without_examples(messages: Sequence[Mapping[str, Any]], prompt: Prompt) -> Sequence[Mapping[str, Any]]:
    """The conversation, and instructions before it, without the target's worked examples that a client may send ahead:
    all its conversations begin with those, and none is about what they say."""
    examples = [(m.role, m.content) for m in prompt.examples]
    start = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    ahead = [(m["role"], m.get("content") or "") for m in messages[start : start + len(examples)]]
    if not examples or ahead != examples:
        return messages
    return [*messages[:start], *messages[start + len(examples) :]]


class RouteMaker:
    """Asks routers on the engine's thread. Requests that come while it is busy are decided together."""

    def __init__(self, engine: LocalEngine, renderer: Renderer, prompt: Prompt) -> None:
        self.engine, self.renderer, self.prompt = engine, renderer, prompt
        self._lock = threading.Lock()
        self._pending: list[_Asked] = []

    async def decide(self, words: str, router: Router) -> RouteDecision:
        """`router`'s decision for a conversation that begins with `words`; its milliseconds count from this call.
        Raises `ProviderError` when the engine has ended, or its GPU has no memory for this."""
        if router.mode in ("fixed", "off"):
            return router.decide(count=1)[0]
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RouteDecision] = loop.create_future()
        one = opening_of(self.prompt, self.renderer, [Message("user", words)])
        one = Opening(one.prompt[: one.shared + MOST_TOKENS], one.shared, one.text)
        with self._lock:
            self._pending.append(_Asked(router, one, future, loop))
            first = len(self._pending) == 1
        if first:
            try:
                self.engine.call(self._decide_pending).add_done_callback(self._refuse_if_ended)
            except ProviderError as problem:
                self._refuse_pending(problem)
        decision = await future
        return replace(decision, milliseconds=1000 * (time.perf_counter() - began))

    def warm(self, router: Router) -> None:
        """Compute what all requests share, and with it see that the router can decide. Raises what it raises."""
        opening = opening_of(self.prompt, self.renderer, [Message("user", "?")])
        self.engine.call(lambda: router.route(self.engine.policy, self.renderer, [opening])).result()

    def _refuse_if_ended(self, done: Future[None]) -> None:
        if problem := done.exception():
            self._refuse_pending(problem)

    def _refuse_pending(self, problem: BaseException) -> None:
        """Refuse all who wait: the engine will not decide, and only the first who waits asks it."""
        for one in self._taken():
            _settle(one.loop, one.future, problem)

    def _taken(self) -> list[_Asked]:
        """Those who wait; whoever comes next is the first again."""
        with self._lock:
            taken, self._pending = self._pending, []
        return taken

    def _decide_pending(self) -> None:
        mine = self._taken()
        # While a release is replaced, those that began before ask its router and the others the new one.
        for router in {id(one.router): one.router for one in mine}.values():
            asked = [one for one in mine if one.router is router]
            outcomes: Sequence[RouteDecision | BaseException]
            try:
                outcomes = router.route(self.engine.policy, self.renderer, [one.opening for one in asked])
            except torch.OutOfMemoryError as problem:
                outcomes = [self.engine.refused(problem)] * len(asked)
                logger.error("%d conversations are refused: %s", len(asked), outcomes[0])
            except Exception as problem:  # carried to those who asked, who are in another thread
                logger.exception("the router failed")
                outcomes = [problem] * len(asked)
            for one, outcome in zip(asked, outcomes, strict=True):
                _settle(one.loop, one.future, outcome)


@dataclass(frozen=True)
class _Asked:
    """A request that waits for a router's decision."""

    router: Router
    opening: Opening
    future: asyncio.Future[RouteDecision]
    loop: asyncio.AbstractEventLoop


def _settle(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[RouteDecision], outcome: RouteDecision | BaseException
) -> None:
    """Hand an outcome to a coroutine that may have been cancelled meanwhile, or whose loop is closed."""

    def hand() -> None:
        if future.done():
            return
        if isinstance(outcome, ProviderError):  # for the gateway, which refuses with 503
            future.set_exception(outcome)
        elif isinstance(outcome, BaseException):
            future.set_exception(ApiError(500, "the router failed; the gateway's log says why"))
        else:
            future.set_result(outcome)

    if not loop.is_closed():
        loop.call_soon_threadsafe(hand)


class RouteBook:
    """Decisions by conversation, and names of conversations by what was said in them; what was not seen for longest is
    forgotten first."""

    def __init__(self, most: int = CONVERSATIONS) -> None:
        self._most = most
        self._known: OrderedDict[str, Routed] = OrderedDict()
        self._names: OrderedDict[str, str] = OrderedDict()

    def get(self, conversation: str) -> Routed | None:
        """The decision of a conversation that is known."""
        routed = self._known.get(conversation)
        if routed is not None:
            self._known.move_to_end(conversation)
        return routed

    def keep(self, conversation: str, routed: Routed) -> None:
        """Keep a decision."""
        self._known[conversation] = routed
        self._known.move_to_end(conversation)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def name(self, history: History) -> str:
        """The conversation that went as `history` did up to the latest answer of it that is known; "" where there is
        none, or where several did: nothing tells whose turn this is."""
        return next((self._names[key] for key in reversed(history.answered) if key in self._names), "")

    def heard(self, key: str, name: str) -> None:
        """Keep that a conversation went as `key` says (`History.with_answer`)."""
        self._names[key] = name if self._names.get(key, name) == name else ""
        self._names.move_to_end(key)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)


class History:
    """What is known of a conversation from the messages of a request (`messages`: those that are the conversation's
    own). `opening` is a hash of owner, model and what stands before the first answer: equal openings share a route.
    `answered` has one hash for each answer, of all that was said up to and with it: conversations that begin alike are
    told apart by what they were answered."""

    def __init__(self, asked: ChatRequest, messages: Sequence[Mapping[str, Any]], owner: str) -> None:
        self._said = hashlib.sha256(json.dumps([owner, asked.model, asked.prompt]).encode())
        self.opening, self.answered = "", list[str]()
        begun = False
        for message in messages:
            answer = begun and message["role"] == "assistant"
            if answer and not self.opening:
                self.opening = self._said.hexdigest()
            self._said.update(_hashed(message))
            if answer:
                self.answered.append(self._said.hexdigest())
            begun = begun or message["role"] == "user"
        self.opening = self.opening or self._said.hexdigest()

    def with_answer(self, message: Mapping[str, Any]) -> str:
        """The hash of all messages and the answer to them: what the next request has in `answered`."""
        said = self._said.copy()
        said.update(_hashed(message))
        return said.hexdigest()

    def new_name(self) -> str:
        """An id for a conversation that begins now. However many begin with the same words, also at once, in another
        gateway or after a restart, each has its own."""
        return f"h-{self.opening[:24]}-{uuid.uuid4().hex[:16]}"


def words_of(message: Mapping[str, Any]) -> list[Any]:
    """What of a message stays the same when a client sends back what it was told: role, text and calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if isinstance(content, str):
        content = content.strip()
    if isinstance(calls, list):
        calls = [call.get("function") if isinstance(call, dict) else call for call in calls]
    role = str(message.get("role", "assistant"))
    return [ROLES.get(role, role), content or "", calls or []]


def _hashed(message: Mapping[str, Any]) -> bytes:
    return json.dumps(words_of(message), sort_keys=True).encode()


def check_name(header: str) -> None:
    """Raises `ApiError` (400) for an id of a client that cannot be one."""
    if len(header) > 128 or not header.isprintable() or not header.isascii():
        raise ApiError(400, "x-trace-conversation must be at most 128 printable ASCII characters")
