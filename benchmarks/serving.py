"""What the gateway adds to a request, whether it grows, and what other clients behind it would cost.

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
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess

import aiohttp
import httpx
import numpy as np
import psutil
import uvicorn
from starlette.types import Receive, Scope, Send

from flows.serve import keep_loaded
from models.providers.litellm_client import litellm_modules
from models.serving.fleet.lifecycle import AdapterState, ServedAdapter
from models.serving.fleet.releases import Generation, Standing
from models.serving.gateway.app import GatewayApp
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.settings import GatewaySettings
from models.serving.upstreams.http import HttpUpstream
from models.serving.upstreams.pool import Pool, Servers

NAME = "refund_payment@v1-0123abcd"
BODY: dict[str, object] = {
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
    generation = Generation(1, {"refund_payment": NAME})

    def adapters(self) -> list[ServedAdapter]:
        return [self.adapter]

    def standing(self) -> Standing:
        return Standing(self.generation, 1)

    def reconcile(self) -> list[str]:
        return []

    def follow(self) -> list[str]:
        return []

    def enter(self) -> Generation:
        return self.generation

    def acquire(self, generation: Generation, capability: str) -> ServedAdapter | None:
        return self.adapter

    def leave(self, generation: Generation, name: str = "") -> None: ...

    def report(self, name: str, replica: str = "") -> None: ...

    def replicas(self) -> list[str]:
        return []


async def stub(scope: Scope, receive: Receive, send: Send) -> None:
    """An OpenAI-like server that answers after as many milliseconds as it may take tokens. No framework: what it costs
    itself is taken from the same processors as the gateway."""
    if scope["type"] == "lifespan":
        return
    content, more = b"", True
    while more:
        part = await receive()
        content, more = content + part.get("body", b""), part.get("more_body", False)
    body = json.loads(content)
    await asyncio.sleep((body.get("max_tokens") or body["max_completion_tokens"]) / 1000)
    head = {"id": "1", "created": 1, "model": body["model"], "usage": {}}
    kind = b"text/event-stream" if body.get("stream") else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if body.get("stream"):
        for word in ("one ", "two ", "three"):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            event = f"data: {json.dumps(head | {'choices': [choice]})}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return
    choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
    answer = json.dumps(head | {"object": "chat.completion", "choices": [choice]}).encode()
    await send({"type": "http.response.body", "body": answer})


def serve(port: int, behind: str) -> None:
    """A stub, or, with an address behind it, a gateway; until the process is ended."""
    app: object = stub
    if behind:
        settings = GatewaySettings(base="base", most_requests=1024)
        app = GatewayApp(Gateway(settings, HttpUpstream(Pool(Servers([behind])), "base"), OneAdapter()))
    keep_loaded()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)  # type: ignore[arg-type]


def started(behind: str = "") -> tuple[BaseProcess, str]:
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
    another ended. The stub waits half to one and a half times `think` seconds, and the first requests are spread over
    that time: workers in step would measure a queue of `concurrency` requests that came at the same instant. Each
    worker's first request opens connections, and is asked beyond `count`."""
    seconds = list[float]()
    left = iter(np.random.default_rng(count).uniform(500 * think, 1500 * think, count + concurrency).astype(int))

    async def worker(late: float) -> None:
        await asyncio.sleep(late)
        first = True
        for wait in left:
            began = time.perf_counter()
            await ask({**BODY, "max_tokens": max(1, int(wait)), **({"stream": True} if stream else {})})
            if not first:
                seconds.append(time.perf_counter() - began - wait / 1000)
            first = False

    await asyncio.gather(*(worker(think * i / concurrency) for i in range(concurrency)))
    return np.array(seconds)


def asker(client: aiohttp.ClientSession, url: str) -> Ask:
    async def ask(body: dict[str, object]) -> None:
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    return ask


def with_httpx(client: httpx.AsyncClient, url: str) -> Ask:
    async def ask(body: dict[str, object]) -> None:
        (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()

    return ask


def lite(url: str) -> Ask:
    """LiteLLM's client."""
    litellm, _ = litellm_modules()

    async def ask(body: dict[str, object]) -> None:
        given = {k: v for k, v in body.items() if k != "model"}
        await litellm.acompletion(model=f"hosted_vllm/{NAME}", api_base=f"{url}/v1", api_key="none", **given)

    return ask


def told(name: str, direct: np.ndarray, through: np.ndarray) -> None:
    added = {q: 1000 * (np.quantile(through, q) - np.quantile(direct, q)) for q in (0.5, 0.99)}
    figures = ", ".join(f"p{100 * q:.0f} {value:.1f} ms" for q, value in added.items())
    alone = ", ".join(f"p{100 * q:.0f} {1000 * np.quantile(direct, q):.1f}" for q in (0.5, 0.99))
    print(f"{name}: added {figures} (direct: {alone} ms)")


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))


async def latency(args: argparse.Namespace, direct: str, through: str) -> None:
    async with session() as client:
        for stream in (False, True):
            rounds: dict[str, list[np.ndarray]] = {direct: [], through: []}
            for url in (direct, through) * 4:
                rounds[url].append(await load(asker(client, url), args.sample, args.concurrency, args.think, stream))
            told("streamed" if stream else "whole", *(np.concatenate(rounds[u]) for u in (direct, through)))


async def clients(args: argparse.Namespace, url: str) -> None:
    """What a request costs this process with each client that could stand behind the gateway."""
    mine = psutil.Process()
    async with session() as own, httpx.AsyncClient(timeout=60, trust_env=False) as plain:
        for name, ask in (("aiohttp", asker(own, url)), ("httpx", with_httpx(plain, url)), ("LiteLLM", lite(url))):
            await load(ask, args.concurrency, args.concurrency)
            busy = sum(mine.cpu_times()[:2])
            await load(ask, args.sample, args.concurrency, args.think)
            busy = sum(mine.cpu_times()[:2]) - busy
            asked = args.sample + args.concurrency
            print(f"{name} as a client: {1000 * busy / asked:.2f} ms of processor a request")


async def growth(args: argparse.Namespace, process: psutil.Process, url: str) -> None:
    async with session() as client:
        warm = max(1, int(WARM * args.requests))
        await load(asker(client, url), warm, args.concurrency)
        before = process.num_fds(), process.memory_info().rss / 2**20
        began, busy = time.perf_counter(), sum(process.cpu_times()[:2])
        await load(asker(client, url), args.requests - warm, args.concurrency)
        seconds, busy = time.perf_counter() - began, sum(process.cpu_times()[:2]) - busy
        after = process.num_fds(), process.memory_info().rss / 2**20
    asked = args.requests - warm + args.concurrency
    print(
        f"{args.requests} requests: descriptors {before[0]} -> {after[0]}, "
        f"memory {before[1]:.1f} -> {after[1]:.1f} MiB, "
        f"{asked / seconds:.0f} requests/s through the gateway"
    )
    # What other work on the machine does not change; its waiting is in the figures of latency.
    print(f"processor time of the gateway: {1000 * busy / asked:.2f} ms a request")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--sample", type=int, default=640)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--think", type=float, default=0.25)
    args = parser.parse_args()
    keep_loaded()
    upstream, direct = started()
    gate, through = started(direct)
    asyncio.run(latency(args, direct, through))
    asyncio.run(clients(args, direct))
    measured, url = started(direct)
    asyncio.run(growth(args, psutil.Process(measured.pid), url))
    for process in (gate, measured, upstream):
        process.terminate()


if __name__ == "__main__":
    main()
