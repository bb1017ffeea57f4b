"""What the gateway's tests share: servers in threads, an OpenAI-like server behind it, a fleet made by hand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from models.serving.fleet.lifecycle import AdapterState, ServedAdapter
from models.serving.fleet.releases import Generation, Standing

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Address of `app`, served in a thread on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


@dataclass
class Stub:
    """An OpenAI-like server that echoes. What it does is told by the last message: "stall" never answers, "fail" is a
    500 that tells of a path, "long" a context error, "call" a tool call, "drip" a stream that stops after its first
    word. `gone` are adapters that it does not know; `counts_on`: asked to, it counts a stream's tokens as it goes. A
    stream ends `lingers` seconds after its last event."""

    delay: float = 0.0
    models: tuple[str, ...] = ("stub-base", "refund@v1-aaaaaaaa")
    gone: set[str] = field(default_factory=set)
    counts_on: bool = False
    lingers: float = 0.0
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def app(self) -> Starlette:
        paths = {"/v1/chat/completions": self.chat, "/v1/completions": self.complete, "/health": self.health}
        return Starlette(routes=[Route(p, e, methods=["GET", "POST"]) for p, e in paths.items()])

    async def health(self, request: Request) -> Response:
        return JSONResponse({})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        choice = {"index": 0, "text": f"after {body['prompt']}", "finish_reason": "stop"}
        return JSONResponse(
            {"id": "1", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice]}
        )

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        self.keys.add(request.headers.get("authorization", ""))
        self.counts["asked"] += 1
        text = body["messages"][-1].get("content") or ""
        if body["model"] not in self.models or body["model"] in self.gone:
            return JSONResponse({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)
        if text == "fail":
            return JSONResponse({"error": {"message": "Traceback in /secret/path"}}, 500)
        if text == "long":
            told = "This model's maximum context length is 1024 tokens. However, you requested 5000 tokens."
            return JSONResponse({"error": {"message": told, "code": 400}}, 400)
        if text == "liar":
            body["model"] = "stub-base"
        if text == "stall":  # until whoever asked hangs up
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.counts["cancelled"] += 1
            return Response(status_code=499)
        await asyncio.sleep(self.delay)
        head = {"id": "1", "created": 1, "model": body["model"]}
        if body.get("stream"):
            events = self.events(head, text, bool(body.get("tools")), body.get("stream_options") or {})
            return StreamingResponse(events, media_type="text/event-stream")
        message: dict[str, Any] = {"role": "assistant", "content": f"you said {text}"}
        if text == "call":
            function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"order": 7}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if text == "call" else "stop"}
        return JSONResponse(head | {"object": "chat.completion", "choices": [choice], "usage": USAGE})

    async def events(
        self, head: dict[str, Any], text: str, tools: bool, options: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if tools and text == "call":
            begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "refund", "arguments": ""}}
            deltas += [{"tool_calls": [begun]}]
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"order"', ": 7}")]
        else:
            deltas += [{"content": word} for word in ("you ", "said ", text)]
        finish = "tool_calls" if text == "call" else "stop"
        running, sampled = self.counts_on and options.get("continuous_usage_stats"), 0
        try:
            for delta in [*deltas, {}]:
                choice = {"index": 0, "delta": delta, "finish_reason": None if delta else finish}
                chunk = head | {"object": "chat.completion.chunk", "choices": [choice]}
                sampled += bool(delta.get("content"))
                chunk |= {"usage": {**USAGE, "completion_tokens": sampled}} if running else {}
                yield f"data: {json.dumps(chunk)}\n\n".encode()
                await asyncio.sleep(3600 if text == "drip" and delta.get("content") else 0)
            if options.get("include_usage"):
                chunk = head | {"object": "chat.completion.chunk", "choices": [], "usage": USAGE}
                yield f"data: {json.dumps(chunk)}\n\n".encode()
            yield b"data: [DONE]\n\n"
            await asyncio.sleep(self.lingers)
        except (asyncio.CancelledError, GeneratorExit):
            self.counts["cancelled"] += 1
            raise


class HandMadeFleet:
    """`AdapterFleet` without servers behind it: adapters are live because a test says so."""

    def __init__(self, *names: str, router: Any = None) -> None:
        self.known = {name: _served(name) for name in names}
        self.held: Counter[str] = Counter()
        self.entered: Counter[Generation] = Counter()
        self.reported: list[tuple[str, str]] = []
        self.problem, self.wanted = "", 1
        self.generation = Generation()
        self.swap(1, *names, router=router)

    def swap(self, number: int, *names: str, router: Any = None) -> None:
        """Serve another release."""
        self.known = {name: self.known.get(name) or _served(name) for name in names}
        members = {a.capability: a.name for a in self.known.values()}
        version = router.version if router else ""
        self.generation = Generation(number, members, router, version)

    def adapters(self) -> list[ServedAdapter]:
        return [replace(a, in_flight=self.held[a.name]) for a in self.known.values()]

    def standing(self) -> Standing:
        return Standing(self.generation, self.wanted, self.problem)

    def reconcile(self) -> list[str]:
        return []

    def follow(self) -> list[str]:
        return []

    def enter(self) -> Generation:
        self.entered[self.generation] += 1
        return self.generation

    def acquire(self, generation: Generation, capability: str) -> ServedAdapter | None:
        adapter = self.known.get(generation.members.get(capability, ""))
        if adapter is None or adapter.state is not AdapterState.LIVE:
            return None
        self.held[adapter.name] += 1
        return adapter

    def leave(self, generation: Generation, name: str = "") -> None:
        self.entered[generation] -= 1
        if name:
            self.held[name] -= 1

    def report(self, name: str, replica: str = "") -> None:
        self.reported.append((name, replica))

    def replicas(self) -> list[str]:
        return []

    def turn(self, name: str, state: AdapterState) -> None:
        """Say what an adapter's state is."""
        self.known[name] = replace(self.known.get(name) or _served(name), state=state)


def _served(name: str) -> ServedAdapter:
    capability, _, version = name.partition("@v")
    return ServedAdapter(name, capability, version.partition("-")[0], "0" * 64, AdapterState.LIVE, 1.0)
