"""What the gateway adds to a request, whether it grows, and which client is the quickest behind it.

python -m benchmarks.serving [--requests 20000] [--concurrency 32] [--think 0.25]

The stub answers after about `--think` seconds, as a model would, and what it waited is taken off; the same client asks
it directly and through the gateway, in turns, so that both see the same machine. Client, gateway and stub are processes
of their own. Routing is measured by `benchmarks/router.py`; here the model is asked for by name, so that what is
measured is the gateway alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import numpy as np
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from models.gateway import Gateway
from models.gateway_app import GatewayApp
from models.gateway_settings import GatewaySettings
from models.http_upstream import HttpUpstream, Pool, Servers
from models.lifecycle import AdapterState, ServedAdapter

NAME = "refund_payment@v1-0123abcd"
BODY = {
    "model": NAME,
    "messages": [
        {"role": "system", "content": "You work at the desk of a shop. " * 20},
        {"role": "user", "content": "Refund 7."},
    ],
    "tools": [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"type": "object"}}} for i in range(8)
    ],
}
# The least share of the requests before which the process is not yet what it stays.
WARM = 0.1
Ask = Callable[[dict[str, object]], Awaitable[object]]


class OneAdapter:
    """A fleet with one adapter that is always live."""

    adapter = ServedAdapter(NAME, "refund_payment", "1", "0" * 64, AdapterState.LIVE, 0.0)

    def adapters(self) -> list[ServedAdapter]:
        return [self.adapter]

    def reconcile(self) -> list[str]:
        return []

    def acquire(self, capability: str) -> ServedAdapter | None:
        return self.adapter

    def release(self, name: str) -> None: ...

    def report(self, name: str, replica: str = "") -> None: ...

    def replicas(self) -> list[str]:
        return []


def stub() -> Starlette:
    """An OpenAI-like server that answers after as many milliseconds as it may take tokens."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        await asyncio.sleep((body.get("max_tokens") or body["max_completion_tokens"]) / 1000)
        head = {"id": "1", "created": 1, "model": body["model"]}
        if body.get("stream"):

            async def events() -> AsyncIterator[bytes]:
                for word in ("one ", "two ", "three"):
                    choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
                    yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n".encode()
                yield b"data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
        return JSONResponse(head | {"object": "chat.completion", "choices": [choice], "usage": {}})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def serve(port: int, behind: str) -> None:
    """A stub, or, with an address behind it, a gateway; until the process is ended."""
    app: object = stub()
    if behind:
        settings = GatewaySettings(base="base", most_requests=1024)
        app = GatewayApp(Gateway(settings, HttpUpstream(Pool(Servers([behind])), "base"), OneAdapter()))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)  # type: ignore[arg-type]


def started(behind: str = "") -> tuple[multiprocessing.Process, str]:
    """A server in a process of its own, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, behind), daemon=True)
    process.start()
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"http://127.0.0.1:{port}"
        time.sleep(0.1)
    raise TimeoutError(f"the server on port {port} did not start")


async def load(ask: Ask, count: int, concurrency: int, think: float = 0.0, stream: bool = False) -> np.ndarray:
    """Seconds that each of `count` requests took beyond what the stub waited, `concurrency` at once, each begun when
    another ended. The stub waits half to one and a half times `think` seconds: answers of equal length would keep all
    workers in step, and what is measured would be a queue of `concurrency` at once."""
    seconds, left = [], iter(np.random.default_rng(count).uniform(500 * think, 1500 * think, count).astype(int))

    async def worker() -> None:
        for wait in left:
            began = time.perf_counter()
            await ask(BODY | {"max_tokens": max(1, int(wait))} | ({"stream": True} if stream else {}))
            seconds.append(time.perf_counter() - began - wait / 1000)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return np.array(seconds)


def asker(client: httpx.AsyncClient, url: str) -> Ask:
    async def ask(body: dict[str, object]) -> None:
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        answer.raise_for_status()

    return ask


def lite(url: str) -> Ask:
    """LiteLLM's client, as it would stand behind the gateway."""
    import litellm

    async def ask(body: dict[str, object]) -> None:
        given = {k: v for k, v in body.items() if k != "model"}
        await litellm.acompletion(model=f"hosted_vllm/{NAME}", api_base=f"{url}/v1", api_key="none", **given)

    return ask


def told(name: str, direct: np.ndarray, through: np.ndarray) -> None:
    added = {q: 1000 * (np.quantile(through, q) - np.quantile(direct, q)) for q in (0.5, 0.99)}
    figures = ", ".join(f"p{100 * q:.0f} {value:.1f} ms" for q, value in added.items())
    print(f"{name}: added {figures} (direct: p50 {1000 * np.median(direct):.1f} ms)")


async def latency(args: argparse.Namespace, direct: str, through: str) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        for stream in (False, True):
            rounds: dict[str, list[np.ndarray]] = {direct: [], through: []}
            for url in (direct, through) * 4:
                rounds[url].append(await load(asker(client, url), args.sample, args.concurrency, args.think, stream))
            # The first round of each opens its connections.
            told("streamed" if stream else "whole", *(np.concatenate(rounds[u][1:]) for u in (direct, through)))
        quick = await load(asker(client, direct), args.sample, args.concurrency, args.think)
        with_lite = [await load(lite(direct), args.sample, args.concurrency, args.think) for _ in range(2)][1]
        told("LiteLLM's client against httpx, no gateway", quick, with_lite)


async def growth(args: argparse.Namespace, process: psutil.Process, url: str) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        warm = max(1, int(WARM * args.requests))
        await load(asker(client, url), warm, args.concurrency)
        before = process.num_fds(), process.memory_info().rss / 2**20
        began, busy = time.perf_counter(), sum(process.cpu_times()[:2])
        await load(asker(client, url), args.requests - warm, args.concurrency)
        seconds, busy = time.perf_counter() - began, sum(process.cpu_times()[:2]) - busy
        after = process.num_fds(), process.memory_info().rss / 2**20
    print(
        f"{args.requests} requests: descriptors {before[0]} -> {after[0]}, "
        f"memory {before[1]:.1f} -> {after[1]:.1f} MiB, "
        f"{(args.requests - warm) / seconds:.0f} requests/s through the gateway"
    )
    # What other work on the machine does not change; its waiting is in the figures of latency.
    print(f"processor time of the gateway: {1000 * busy / (args.requests - warm):.2f} ms a request")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--sample", type=int, default=640)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--think", type=float, default=0.25)
    args = parser.parse_args()
    upstream, direct = started()
    gate, through = started(direct)
    asyncio.run(latency(args, direct, through))
    measured, url = started(direct)
    asyncio.run(growth(args, psutil.Process(measured.pid), url))
    for process in (gate, measured, upstream):
        process.terminate()


if __name__ == "__main__":
    main()
