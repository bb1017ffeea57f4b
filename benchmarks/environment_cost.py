"""What an environment costs: reset, step and score, 32 episodes at once, and 1,000 episodes without a leak.

    PYTHONPATH=. python benchmarks/environment_cost.py                       # tau2, BFCL, AgentDojo; about a minute
    PYTHONPATH=. TRACE_TOOLSANDBOX=... python benchmarks/environment_cost.py toolsandbox

Milliseconds, median and 95th percentile over the reference solutions of the test split; the first reset of a task and
the first import are left out. Steps of the 32 interleaved episodes are taken in turn.

Not called environments.py: as a script's neighbour it would hide the package of that name.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from typing import Any

import psutil

from environments.contract import Action
from environments.targets.catalogue import load_target
from environments.targets.reference_check import oracle, play

TARGETS = ("tau2:airline", "tau2:retail", "tau2:telecom", "bfcl:base", "agentdojo:banking", "agentdojo:workspace")
TOGETHER, EPISODES = 32, 1000
_SLOW = {"toolsandbox", "agentdojo:workspace"}


def _timed(call: Any, *arguments: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call(*arguments)
    return result, 1000 * (time.perf_counter() - start)


def _figures(samples: list[float]) -> str:
    ordered = sorted(samples)
    return f"{statistics.median(ordered):8.3f} {ordered[int(0.95 * (len(ordered) - 1))]:8.3f}"


def costs(target: Any, limit: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of every reset, step and score of the reference solutions of the test split."""
    environment, resets, steps, scores = target.environment(), [], [], []
    for task in target.tasks("test")[:limit]:
        environment.reset(task)
        observation, spent = _timed(environment.reset, task)
        resets.append(spent)
        done = observation.done
        while not done and (action := environment.oracle()) is not None:
            observation, spent = _timed(environment.step, action)
            steps.append(spent)
            done = observation.done
        environment.score()
        scores.append(_timed(environment.score)[1])
    return resets, steps, scores


def together(target: Any) -> tuple[int, float]:
    """Play 32 reference solutions in turn, a step each: how many succeed, and the milliseconds of a step."""
    tasks = (list(target.tasks("test")) * TOGETHER)[:TOGETHER]
    environments = [target.environment() for _ in tasks]
    live = {index for index, task in enumerate(tasks) if not environments[index].reset(task).done}
    steps, start = 0, time.perf_counter()
    while live:
        for index in sorted(live):
            action: Action | None = environments[index].oracle()
            if action is None or environments[index].step(action).done:
                live.discard(index)
            steps += 1
    spent = 1000 * (time.perf_counter() - start)
    return sum(environment.score().success for environment in environments), spent / max(1, steps)


def leaks(target: Any, episodes: int) -> str:
    """Play many episodes: threads, child processes and resident memory before and after."""
    process, tasks = psutil.Process(), list(target.tasks("diagnosis"))
    for task in tasks[:20]:
        play(target.environment(), task, oracle)

    def state() -> tuple[int, int, float]:
        return threading.active_count(), len(process.children(recursive=True)), process.memory_info().rss / 2**20

    before = state()
    for number in range(episodes):
        environment = target.environment()
        play(environment, tasks[number % len(tasks)], oracle)
        environment.close()
    after = state()
    memory = f"{before[2]:.0f} -> {after[2]:.0f} MB"
    return f"{episodes} episodes: threads {before[0]} -> {after[0]}, children {before[1]} -> {after[1]}, {memory}"


def main(names: list[str]) -> None:
    """Print one row per target and one line about leaks."""
    columns = " ".join(f"{word:>8}" for word in ("reset", "p95", "step", "p95", "score", "p95"))
    print(f"{'target':20} {columns} {'32 at once':>10} {'ms/step':>8}")
    notes = []
    for name in names:
        target, slow = load_target(name, "scripted"), name in _SLOW
        resets, steps, scores = costs(target, 12 if slow else 1000)
        succeeded, per_step = together(target)
        figures = f"{_figures(resets)} {_figures(steps)} {_figures(scores)}"
        print(f"{name:20} {figures} {succeeded:4} of {TOGETHER} {per_step:8.3f}", flush=True)
        notes.append(f"{name}: {leaks(target, 100 if slow else EPISODES)}")
    print("\n".join(notes))


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
