"""What overlapping environments gain and take, and what sharing a stage costs.

    python -m benchmarks.sharding [--only overlap memory overhead] [--episodes 10000]

- overlap: 256 episodes of eight steps, each of which sleeps 50 ms, on a stub server: all at once against one after the
  other (8 of them, the seconds times 32). It must be at least 20 times faster.
- memory: 10,000 episodes of the shop open at once on two stub servers, in this process: peak memory, which must be at
  most 2 GiB. What the stubs sample makes no sense, so that most of them end early.
- overhead: a stage of 96 episodes of the shop on the embedded model, as shards against plain, in turns, in
  processor time: at most 5 % more.

The stub servers are processes of their own, and answer in 2 ms. Exits with 1 when a figure misses what it must reach.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from environments.contract import Action, Environment, Message, Observation, Score, TargetTask
from environments.targets.shop import target
from environments.targets.shop.episode import ShopEnvironment
from models.episodes import Episode, Player
from models.local.base import load_renderer
from models.policy import PolicyIdentity, Sampling
from models.renderer import Renderer
from models.vllm.policy import VllmPolicy
from models.vllm.server import VllmServer
from tests.models.vllm_backend.stub_processes import StubProcess, stub_processes

STEPS, STEP_SECONDS, EPISODES, ALONE = 8, 0.05, 256, 8
ANSWER_SECONDS = 0.002
_COUNTING = threading.Lock()


class Slow:
    """Steps, each of which takes STEP_SECONDS."""

    tools: Sequence[Any] = ()
    instructions = "Answer."
    examples: Sequence[Message] = ()
    max_steps = STEPS

    def reset(self, task: TargetTask) -> Observation:
        return Observation((Message("user", f"Question {task.seed}."),))

    def step(self, action: Action) -> Observation:
        time.sleep(STEP_SECONDS)
        return Observation((Message("user", "And then?"),))

    def score(self) -> Score:
        return Score(1.0, True)

    def oracle(self) -> Action | None:
        return None

    def close(self) -> None: ...


class CountedShop(ShopEnvironment):
    """The shop. `open` of them are begun and not ended, at most `most` at any time."""

    open = most = 0

    def reset(self, task: TargetTask) -> Observation:
        with _COUNTING:
            CountedShop.open += 1
            CountedShop.most = max(CountedShop.most, CountedShop.open)
        return super().reset(task)

    def close(self) -> None:
        with _COUNTING:
            CountedShop.open -= 1


def play(
    renderer: Renderer,
    stubs: Sequence[StubProcess],
    make: Callable[[], Environment],
    tasks: Sequence[TargetTask],
    window: int,
) -> tuple[float, int]:
    """Seconds and turns of an episode of each task, `window` of them open at once."""
    policy = VllmPolicy(
        [VllmServer(stub.url, "base", connections=64) for stub in stubs], PolicyIdentity("b", "1"), frozenset({0}), 64
    )
    player = Player(make, policy, renderer, Sampling(1.0, 4), window)
    began, played = time.perf_counter(), 0
    for trajectory in player.play(Episode(f"{i}", task, i) for i, task in enumerate(tasks)):
        assert trajectory.score is not None, f"an episode was lost: {trajectory.error}"
        played += 1
    spent = time.perf_counter() - began
    policy.close()
    assert played == len(tasks), f"{len(tasks) - played} of {len(tasks)} episodes were lost"
    return spent, player.steps


def overlap(renderer: Renderer) -> bool:
    with stub_processes(1, ANSWER_SECONDS) as stubs:
        tasks = [TargetTask(f"{i}", "test", "all", i) for i in range(EPISODES)]
        alone = play(renderer, stubs, Slow, tasks[:ALONE], 1)[0] * EPISODES / ALONE
        before = time.process_time()
        together, _ = play(renderer, stubs, Slow, tasks, EPISODES)
        spent = time.process_time() - before
    ratio = alone / together
    print(
        f"overlap: {EPISODES} episodes one after the other {alone:.1f} s, at once {together:.2f} s "
        f"({spent:.2f} s of a processor): {ratio:.1f} times faster"
    )
    return ratio >= 20


def memory(renderer: Renderer, count: int) -> bool:
    shop = target()
    drawn = shop.tasks("diagnosis")
    tasks = [drawn[i % len(drawn)] for i in range(count)]
    before, began = _peak_gib(), time.process_time()
    with stub_processes(2, ANSWER_SECONDS) as stubs:
        make = partial(CountedShop, shop.instructions, shop.examples)
        seconds, turns = play(renderer, stubs, make, tasks, count)
    spent, peak = time.process_time() - began, _peak_gib()
    print(
        f"memory: {count} episodes of the shop, at most {CountedShop.most} open at once, {turns} turns in "
        f"{seconds:.0f} s ({1000 * spent / turns:.2f} ms of a processor each), peak {peak:.2f} GiB, {before:.2f} GiB "
        "before the first"
    )
    return CountedShop.most == count and peak <= 2


def _peak_gib() -> float:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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
    arguments.add_argument("--repeats", type=int, default=4)
    arguments.add_argument("--stage", type=int, default=96, help="episodes of the stage whose overhead is measured")
    given = arguments.parse_args()
    reached = []
    if "overlap" in given.only:
        reached.append(overlap(load_renderer()))
    if "memory" in given.only:
        reached.append(memory(load_renderer(), given.episodes))
    if "overhead" in given.only:
        reached.append(overhead(given.repeats, given.stage))
    raise SystemExit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
