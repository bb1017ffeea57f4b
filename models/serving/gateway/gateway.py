"""The gateway: routes each conversation once, asks an upstream, and says who answered.

What a client may ask for as `model`: the routed name (the router decides), the base, a capability, or one version of
an adapter. Each request is served by one release: it enters the generation that is served when it comes, and router and
adapter are that one's, also when another is swapped in meanwhile. When the adapter that is needed is not live, the base
answers or the request is refused, as the settings say; either is logged, counted and reported in a header.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from errors import TraceError
from models.router.router import ASKED, RouteDecision
from models.serving.fleet.lifecycle import AdapterFleet, AdapterState, ServedAdapter
from models.serving.fleet.releases import Generation
from models.serving.gateway.conversations import (
    History,
    RouteBook,
    Routed,
    RouteMaker,
    check_name,
    first_words,
    without_examples,
)
from models.serving.gateway.keys import most_tokens
from models.serving.gateway.metrics import Metrics
from models.serving.gateway.settings import GatewaySettings, Preset
from models.serving.gateway.traffic_log import LoggedTurn, TrafficLog
from models.serving.openai_api.errors import ApiError, broken, unknown_model
from models.serving.openai_api.requests import ChatRequest, event
from models.serving.upstreams.contract import DEADLINE, AdapterGone, Turn, Upstream

logger = logging.getLogger("trace.gateway")
# What stands in a header as it is, beside letters and digits; a target's name may hold any letters that Python takes.
HEADER_MAY = ":/,@+= "


@dataclass
class RoutedRequest:
    """A request whose route is known. `generation` is what it entered, None once it has left; `held` is the adapter
    that is acquired for it ("" for none). `history` is what the next turn will be recognised by, None where the client
    sends an id. `charged`: its tokens are counted, which happens once however it ends."""

    turn: Turn
    routed: Routed
    generation: Generation | None
    held: str
    headers: dict[str, str]
    began: float
    history: History | None = None
    charged: bool = False


@dataclass(frozen=True)
class Streamed:
    """A streamed answer that has begun. Its reader calls `close`, also when it read no event."""

    events: AsyncGenerator[bytes]
    headers: Mapping[str, str]
    close: Callable[[], Awaitable[None]]


class Gateway:
    """One gateway. `router` asks the router of the release that is served; None routes nothing: the base answers, and
    adapters by name. `log` None stores nothing."""

    def __init__(
        self,
        settings: GatewaySettings,
        upstream: Upstream,
        fleet: AdapterFleet,
        router: RouteMaker | None = None,
        log: TrafficLog | None = None,
        preset: Preset | None = None,
    ) -> None:
        self.settings, self.upstream, self.fleet = settings, upstream, fleet
        self.router, self.log, self.preset = router, log, preset
        self.metrics, self.book = Metrics(), RouteBook()
        self.in_flight = 0
        self._ahead = upstream.ahead(preset.prompt) if preset else 0

    def most_tokens(self, asked: ChatRequest) -> int:
        """About what a request may use of a quota, with the prompt that is put before it."""
        return most_tokens(asked, self._ahead if self._preset_for(asked) else 0, self.upstream.longest)

    async def answer(
        self, asked: ChatRequest, owner: str, header: str = ""
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The body and headers of a whole answer. Raises `ApiError`."""
        async with self._deadline():
            opened = await self._open(asked, owner, header)
            try:
                body = await self._ask(opened)
            finally:
                self._release(opened)
        self._close(opened, owner)
        return body, opened.headers

    async def stream(self, asked: ChatRequest, owner: str, header: str = "") -> Streamed:
        """A streamed answer; its first event has come when this returns. Raises `ApiError`."""
        until = asyncio.get_running_loop().time() + self.settings.deadline
        async with self._deadline():
            opened = await self._open(asked, owner, header)
            try:
                events, first = await self._first(opened)
            except BaseException:
                self._release(opened)
                raise

        async def close() -> None:
            await events.aclose()
            self._release(opened)
            self._charge(opened, owner)

        return Streamed(self._events(opened, events, first, until, owner), opened.headers, close)

    def models(self) -> list[dict[str, Any]]:
        """What `/v1/models` lists."""
        settings = self.settings
        rows: list[dict[str, Any]] = [{"id": settings.routed, "root": settings.base, "parent": None}]
        rows += [{"id": settings.base, "root": settings.base, "parent": None}]
        live = [a for a in self.fleet.adapters() if a.state == AdapterState.LIVE]
        rows += [{"id": a.name, "root": settings.base, "parent": settings.base} for a in live]
        return [row | {"object": "model", "created": 0, "owned_by": "trace"} for row in rows]

    # --- choosing ---------------------------------------------------------------------------------------------

    async def _open(self, asked: ChatRequest, owner: str, header: str) -> RoutedRequest:
        generation, began = self.fleet.enter(), time.monotonic()  # who waits for the router waits for the answer
        try:
            return await self._opened(asked, owner, header, generation, began)
        except BaseException:
            self.fleet.leave(generation)
            raise

    async def _opened(
        self, asked: ChatRequest, owner: str, header: str, generation: Generation, began: float
    ) -> RoutedRequest:
        preset = self._preset_for(asked)
        prompt = preset.prompt if preset else None
        if prompt and asked.body.get("tool_choice") == "none":
            prompt = replace(prompt, tools=())
        routed, history = await self._route(asked, owner, header, generation)
        wanted = routed.decision.capability
        adapter = self.fleet.acquire(generation, wanted) if wanted else None
        missing = wanted if wanted and adapter is None else ""
        if missing:
            self._missing(missing)
        # What is answered is what the next turn of a client that sends no id is known by.
        listen = history is not None or (self.log is not None and self.log.wants(routed.name))
        name = adapter.name if adapter else self.settings.base
        turn = Turn(asked, adapter, name, routed.name, prompt, listen)
        headers = self._headers(routed, adapter, missing, preset)
        held = adapter.name if adapter else ""
        return RoutedRequest(turn, routed, generation, held, headers, began, history)

    def _preset_for(self, asked: ChatRequest) -> Preset | None:
        """What is put before a request. Whoever forbids the use of its own tools for a turn has brought them
        nevertheless."""
        brings = bool(asked.body.get("tools")) or not _plain(asked)
        return self.preset if asked.chat and not brings else None

    async def _route(
        self, asked: ChatRequest, owner: str, header: str, generation: Generation
    ) -> tuple[Routed, History | None]:
        """A request's conversation: the one whose id the client sends, the one that went as its messages say, or a new
        one."""
        check_name(header)
        prompt = self.router.prompt if self.router else self.preset.prompt if self.preset else None
        messages = without_examples(asked.messages, prompt) if prompt else asked.messages
        history = None if header else History(asked, messages, owner)
        fresh = history is not None and not history.answered
        name = (self.book.name(history) or history.new_name()) if history else header
        known = self.book.get(f"{owner}/{name}")
        if known is None and history and (alike := self.book.get(history.opening)):
            known = replace(alike, name=name)  # another conversation that began like this one
        explicit = self._explicit(asked.model, generation)
        if explicit is not None:
            decision = RouteDecision(explicit, {explicit: 1.0}, (), 0.0, ASKED)
            adapter = generation.members.get(explicit, "")
            known = Routed(name, decision, "", generation.number, adapter)
        elif known is None or known.decision.mode == ASKED or not known.holds(generation, fresh):
            decision = await self._decide(asked, messages, generation)
            adapter = generation.members.get(decision.capability, "")
            # Where nothing was said that it could decide on, the release's router was not asked.
            mode = generation.router.mode if generation.router else "off"
            router = "" if decision.mode == "off" != mode else generation.router_version
            known = Routed(name, decision, router, generation.number, adapter)
        self.book.keep(f"{owner}/{name}", known)
        if history and fresh:
            self.book.keep(history.opening, known)
        return known, history if asked.chat else None

    def _explicit(self, model: str, generation: Generation) -> str | None:
        """The capability that a model name asks for ("": the base), or None for the router. Raises `ApiError` (404)."""
        if model == self.settings.routed:
            return None
        if model == self.settings.base:
            return ""
        live = {a.name for a in self.fleet.adapters() if a.state == AdapterState.LIVE}
        for capability, name in generation.members.items():
            if model == capability or (model == name and name in live):
                return capability
        raise unknown_model(model, [row["id"] for row in self.models()])

    async def _decide(
        self, asked: ChatRequest, messages: Sequence[Mapping[str, Any]], generation: Generation
    ) -> RouteDecision:
        """The decision of the generation's router on the conversation's own messages. What is no member counts as no
        adapter."""
        try:
            words = first_words(messages) if asked.chat else asked.prompt
            if self.router is None or generation.router is None or not isinstance(words, str) or not words:
                decision = RouteDecision("", {"": 1.0}, (), 0.0, "off")
            else:
                decision = await self.router.decide(words, generation.router)
        except ApiError:
            raise
        except TraceError as problem:
            logger.error("a request was not routed: %s", problem)
            raise ApiError(503, "the router cannot decide at the moment; ask again") from None
        decision = self._blended(decision, generation)
        if decision.capability not in generation.members:
            decision = replace(decision, capability="")
        probability = max(decision.probabilities.values(), default=1.0)
        self.metrics.routed(decision.capability, decision.mode, decision.milliseconds, probability)
        return decision

    def _blended(self, decision: RouteDecision, generation: Generation) -> RouteDecision:
        """With blending on: the published adapter of the decision's mixture, where there is one."""
        from models.adapters.blending import blend_name, blend_parts

        if not self.settings.blend or not decision.capability:
            return decision
        mixture = decision.mixture(self.settings.blend)
        if not blend_parts(mixture):  # spread over too many to name
            return decision
        name = blend_name(mixture)
        live = {a.name for a in self.fleet.adapters() if a.state == AdapterState.LIVE}
        return replace(decision, capability=name) if generation.members.get(name) in live else decision

    def _missing(self, capability: str) -> None:
        """The adapter is not live: refuse, or let the base answer. Raises `ApiError` (503)."""
        self.metrics.missing.labels(capability, self.settings.missing).inc()
        logger.warning("the adapter of %s is not live: %s", capability, self.settings.missing)
        if self.settings.missing == "503":
            raise ApiError(
                503, f"the adapter of {capability!r} is not live; ask again later", code="adapter_unavailable"
            )

    def _headers(
        self, routed: Routed, adapter: ServedAdapter | None, missing: str, preset: Preset | None
    ) -> dict[str, str]:
        decision = routed.decision
        headers = {
            "x-trace-conversation": routed.name,
            "x-trace-release": str(routed.release or "none"),
            "x-trace-adapter": adapter.name if adapter else "none",
            "x-trace-capability": decision.capability or "none",
            "x-trace-mode": decision.mode,
            "x-trace-route": json.dumps({k or "none": round(v, 4) for k, v in decision.probabilities.items()}),
            "x-trace-router-ms": f"{decision.milliseconds:.1f}",
        }
        if adapter:
            headers["x-trace-version"] = adapter.version
        if routed.router:
            headers["x-trace-router"] = routed.router
        if missing:
            headers["x-trace-missing"] = missing
        if preset:
            headers["x-trace-preset"] = quote(preset.name, HEADER_MAY)
        return headers

    # --- asking -----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.settings.deadline) as limit:
                before = DEADLINE.set(limit)
                try:
                    yield
                finally:
                    DEADLINE.reset(before)
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> ApiError:
        return ApiError(504, f"no answer within {self.settings.deadline:g} seconds; ask for less, or later")

    async def _ask(self, opened: RoutedRequest) -> dict[str, Any]:
        while True:
            try:
                return await self.upstream.answer(opened.turn)
            except AdapterGone as gone:
                self._instead(opened, gone)

    async def _first(self, opened: RoutedRequest) -> tuple[AsyncGenerator[bytes], bytes]:
        """The events of a stream, and the first of them: until it has come, the request can still be refused."""
        while True:
            try:
                return await self._begun(opened.turn)
            except AdapterGone as gone:
                self._instead(opened, gone)

    async def _begun(self, turn: Turn) -> tuple[AsyncGenerator[bytes], bytes]:
        events = self.upstream.stream(turn)
        try:
            return events, await anext(events)
        except StopAsyncIteration:
            raise ApiError(502, "the server behind the gateway answered nothing; ask again") from None

    def _instead(self, opened: RoutedRequest, gone: AdapterGone) -> None:
        """A server did not know the adapter: it is not asked for it again before it was proven anew. The others that
        have it are asked before the adapter is missing, as it is where none of them is there."""
        turn = opened.turn
        assert turn.adapter is not None
        if gone.replica:
            self.fleet.report(turn.adapter.name, gone.replica)
        left = tuple(r for r in turn.adapter.replicas if r != gone.replica)
        if 0 < len(left) < len(turn.adapter.replicas):
            opened.turn = replace(turn, adapter=replace(turn.adapter, replicas=left))
            return
        self._missing(turn.adapter.capability)
        opened.headers |= {"x-trace-adapter": "none", "x-trace-missing": turn.adapter.capability}
        opened.headers.pop("x-trace-version", None)
        opened.turn = replace(turn, name=self.settings.base, adapter=None)

    async def _events(
        self, opened: RoutedRequest, events: AsyncGenerator[bytes], first: bytes, until: float, owner: str
    ) -> AsyncGenerator[bytes]:
        """The rest of a stream. An error is now sent as an event, because the status has been sent already. However it
        ends, also by a client that leaves, what came of it is charged."""
        whole = False
        try:
            yield first
            async with contextlib.aclosing(events), asyncio.timeout_at(until) as limit:
                DEADLINE.set(limit)  # as in `_deadline`; the task is this answer's own
                async for part in events:
                    yield part
            whole = True
        except TimeoutError:
            yield event(self._late().body)
        except ApiError as problem:
            yield event(problem.body)
        except Exception:
            logger.exception("a stream failed")
            yield event(broken().body)
        finally:
            self._release(opened)
            if whole:
                self._close(opened, owner)
            else:
                self._charge(opened, owner)

    def _release(self, opened: RoutedRequest) -> None:
        if opened.generation is not None:
            self.fleet.leave(opened.generation, opened.held)
            opened.generation, opened.held = None, ""

    def _close(self, opened: RoutedRequest, owner: str) -> None:
        """Count an answer, and have it stored."""
        turn = opened.turn
        self.metrics.answered(turn.name)
        self._charge(opened, owner)
        self.metrics.seconds.observe(time.monotonic() - opened.began)
        if opened.history and turn.heard.message:
            self.book.heard(opened.history.with_answer(turn.heard.message), opened.routed.name)
        if self.log is not None and self.log.wants(opened.routed.name):
            self.log.add(LoggedTurn(owner, opened.routed, turn, time.monotonic() - opened.began))

    def _charge(self, opened: RoutedRequest, owner: str) -> None:
        """Count the tokens that were read and sampled for a request, once."""
        if not opened.charged:
            opened.charged, usage = True, opened.turn.heard.usage
            self.metrics.computed(usage.prompt, usage.completion)
            self.settings.keys.spend(owner, usage.prompt + usage.completion)


def _plain(asked: ChatRequest) -> bool:
    """Whether a request brings no instructions of its own."""
    return not any(m["role"] in ("system", "developer") for m in asked.messages)
