"""What overlapping environments gain and take, and what sharing a stage costs.

    python -m benchmarks.sharding [--only overlap memory overhead] [--episodes 10000] [--turns 3]

- overlap: 256 episodes of eight steps, each of which sleeps 50 ms, on a stub server: all at once against one after the
  other (8 of them, the seconds times 32). It must be at least 20 times faster.
- memory: 10,000 episodes open at once on two stub servers, in this process: peak memory, which must be at most 2 GiB.
- overhead: a stage of 96 episodes of the shop on the embedded model, as shards against plain, in turns, in
  processor time: at most 5 % more.

The stub servers are processes of their own, and answer in 2 ms. Exits with 1 when a figure misses what it must reach.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from environments.contract import Action, Message, Observation, Score, TargetTask
from models.episodes import Episode, Player
from models.local.base import load_renderer
from models.policy import PolicyIdentity, Sampling
from models.renderer import Renderer
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer

STEPS, STEP_SECONDS, EPISODES, ALONE = 8, 0.05, 256, 8
ANSWER_SECONDS = 0.002


class Slow:
    """Steps, each of which takes `seconds`."""

    tools: Sequence[Any] = ()
    instructions = "Answer."
    examples: Sequence[Message] = ()
    max_steps = STEPS

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, task: TargetTask) -> Observation:
        return Observation((Message("user", f"Question {task.seed}."),))

    def step(self, action: Action) -> Observation:
        time.sleep(self.seconds)
        return Observation((Message("user", "And then?"),))

    def score(self) -> Score:
        return Score(1.0, True)

    def oracle(self) -> Action | None:
        return None

    def close(self) -> None: ...


def serve(port: int) -> None:
    """A stub of the part of vLLM's interface that is used; it samples by arithmetic."""
    from aiohttp import web

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base", "parent": None, "max_model_len": 4096}]})

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(ANSWER_SECONDS)
        ids = [(sum(body["prompt"]) + i + body.get("seed", 0)) % 50 for i in range(body["max_tokens"])]
        logprobs = {"token_logprobs": [-1.0] * len(ids), "top_logprobs": [{"a": -float(body["temperature"])}]}
        choice = {"finish_reason": "length", "token_ids": ids, "logprobs": logprobs}
        return web.json_response({"model": "base", "choices": [choice]})

    app = web.Application(client_max_size=2**24)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


@contextmanager
def servers(count: int) -> Iterator[list[str]]:
    """Addresses of running stub servers."""
    context, urls, processes = multiprocessing.get_context("spawn"), [], []
    for _ in range(count):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        processes.append(context.Process(target=serve, args=(port,), daemon=True))
        processes[-1].start()
        urls.append(f"http://127.0.0.1:{port}")
    try:
        for url in urls:
            _wait_for(int(url.rpartition(":")[2]))
        yield urls
    finally:
        for process in processes:
            process.terminate()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def play(renderer: Renderer, urls: Sequence[str], count: int, window: int, seconds: float, turns: int) -> float:
    """Seconds of `count` episodes, `window` of them open at once."""
    policy = VllmPolicy(
        [VllmServer(u, "base", connections=64) for u in urls], PolicyIdentity("b", "1"), frozenset({0}), 64
    )
    todo = [Episode(f"{i}", TargetTask(f"{i}", "test", "all", i)) for i in range(count)]

    def make() -> Slow:
        made = Slow(seconds)
        made.max_steps = turns
        return made

    began = time.perf_counter()
    played = sum(t.score is not None for t in Player(make, policy, renderer, Sampling(1.0, 4), window).play(todo))
    spent = time.perf_counter() - began
    policy.close()
    assert played == count, f"{count - played} of {count} episodes were lost"
    return spent


def overlap(renderer: Renderer) -> bool:
    with servers(1) as urls:
        alone = play(renderer, urls, ALONE, 1, STEP_SECONDS, STEPS) * EPISODES / ALONE
        before = time.process_time()
        together = play(renderer, urls, EPISODES, EPISODES, STEP_SECONDS, STEPS)
        spent = time.process_time() - before
    ratio = alone / together
    print(
        f"overlap: {EPISODES} episodes one after the other {alone:.1f} s, at once {together:.2f} s "
        f"({spent:.2f} s of a processor): {ratio:.1f} times faster"
    )
    return ratio >= 20


def memory(renderer: Renderer, count: int, turns: int) -> bool:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with servers(2) as urls:
        seconds = play(renderer, urls, count, count, 0.0, turns)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"memory: {count} episodes of {turns} turns open at once, {seconds:.0f} s "
        f"({count * turns / seconds:.0f} turns/s), peak {peak:.2f} GiB, {before:.2f} GiB before the first"
    )
    return peak <= 2


def overhead(repeats: int, count: int) -> bool:
    """A stage on the embedded model, plain and as shards, in turns."""
    from settings import load_settings
    from tasks.round.engine import PlayRun
    from tasks.round.rollouts import episodes_for
    from tasks.round.stage import forget, open_context
    from tasks.shards.sharing import SharedPlay

    with tempfile.TemporaryDirectory() as home:
        context = open_context(load_settings(home=Path(home), target="shop", profile="laptop"))
        tasks = context.tasks("diagnosis")[:count]
        engine, ground = context.engine.engine, context.ground("diagnosis")
        engine.play(ground, episodes_for(tasks[:16], 1, 999), "warm")
        seconds: dict[str, list[float]] = {"plain": [], "shards": []}
        for repeat in range(repeats):
            for kind in ("plain", "shards") if repeat % 2 == 0 else ("shards", "plain"):
                # The same draws in both: only the trajectories' ids differ, by their scope.
                where = f"{kind} {repeat}"
                mine, episodes = replace(ground, scope=where), episodes_for(tasks, 1, repeat)
                shared = SharedPlay(context)
                began = time.process_time()
                if kind == "plain":
                    run: PlayRun | None = engine.play(mine, episodes, where)
                else:
                    run = shared.play(engine, mine, episodes, where)
                seconds[kind].append(time.process_time() - began)
                assert run is not None
                assert run.played == len(tasks)
        forget(context.round.id)
    pairs = [b / a for a, b in zip(seconds["plain"], seconds["shards"], strict=True)]
    ratio = statistics.median(pairs)
    told = ", ".join(f"{p:.3f}" for p in pairs)
    print(f"overhead: {count} episodes as shards take {ratio:.3f} of their plain processor time (each pair: {told})")
    return ratio <= 1.05


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("overlap", "memory", "overhead")
    arguments.add_argument("--only", nargs="+", choices=parts, default=parts)
    arguments.add_argument("--episodes", type=int, default=10_000)
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--repeats", type=int, default=4)
    arguments.add_argument("--stage", type=int, default=96, help="episodes of the stage whose overhead is measured")
    given = arguments.parse_args()
    reached = []
    if "overlap" in given.only:
        reached.append(overlap(load_renderer()))
    if "memory" in given.only:
        reached.append(memory(load_renderer(), given.episodes, given.turns))
    if "overhead" in given.only:
        reached.append(overhead(given.repeats, given.stage))
    raise SystemExit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
