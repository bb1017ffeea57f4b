"""What the sandbox costs: start of a worker, and a step of a generated environment inside against the same in process.

    python -m benchmarks.sandbox

Bounds: a start in at most 300 ms, at most 1 ms per step over the in-process call, at least 200 steps/s per core.
The process exits with 1 when one is missed. Medians; the level is the strongest that works here.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from environments.sandbox.workers import Worker, choose_level
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.worked_examples import check_before_cancel

SOURCE = Path(check_before_cancel.__file__).read_text(encoding="utf-8")
ROUNDS, EPISODES, STARTS = 5, 150, 15


class InProcess(SandboxedModule):
    """The same module without a sandbox. Only for code that is our own."""

    def call(self, function: str, *arguments: Any) -> Any:
        if function.startswith("="):
            return super().call(function, *arguments)
        return getattr(check_before_cancel, function)(*arguments)


def seconds_per_step(module: SandboxedModule) -> tuple[float, float]:
    """(wall, processor of this process) seconds of one `step`, over the oracle's episodes."""
    environment = module.environment()
    tasks = [module.scenario(seed) for seed in range(EPISODES)]
    wall = processor = 0.0
    steps = 0
    for task in tasks:
        environment.reset(task)
        while (action := environment.oracle()) is not None and action.tool_calls:
            before = time.perf_counter(), time.process_time()
            environment.step(action)
            wall, processor = wall + time.perf_counter() - before[0], processor + time.process_time() - before[1]
            steps += 1
    return wall / steps, processor / steps


def episodes_per_second(module: SandboxedModule) -> tuple[float, float]:
    """(episodes, steps) per second of whole episodes: scenario, reset, oracle, step and score all through the pipe."""
    started, steps = time.perf_counter(), 0
    for seed in range(EPISODES):
        environment = module.environment()
        environment.reset(module.scenario(seed))
        while (action := environment.oracle()) is not None:
            environment.step(action)
            steps += 1
        environment.score()
    took = time.perf_counter() - started
    return EPISODES / took, steps / took


def main() -> int:
    level = choose_level()
    starts = []
    for _ in range(STARTS):
        before = time.perf_counter()
        Worker(SOURCE, level).kill()
        starts.append(time.perf_counter() - before)
    inside, outside = SandboxedModule(SOURCE, level), InProcess(SOURCE, level)
    here = statistics.median(seconds_per_step(outside)[0] for _ in range(ROUNDS))
    there = statistics.median(seconds_per_step(inside)[0] for _ in range(ROUNDS))
    rates = [episodes_per_second(inside) for _ in range(ROUNDS)]
    steps = statistics.median(rate for _, rate in rates)
    inside.close()
    outside.close()
    start, cost = statistics.median(starts), there - here
    print(f"level                                {level}")
    print(f"start of a worker, median / worst    {start * 1e3:6.0f} / {max(starts) * 1e3:.0f} ms   (at most 300)")
    print(f"step in process                      {here * 1e3:9.3f} ms")
    print(f"step in the sandbox                  {there * 1e3:9.3f} ms")
    print(f"cost of the sandbox per step         {cost * 1e3:9.3f} ms   (at most 1)")
    print(f"steps per second, whole episodes     {steps:9.0f}      (at least 200; one core at most is busy at a time)")
    print(f"episodes per second                  {statistics.median(rate for rate, _ in rates):9.0f}")
    met = start <= 0.3 and cost <= 1e-3 and steps >= 200
    print("all bounds met" if met else "A BOUND IS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
