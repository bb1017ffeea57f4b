"""Every target played without a model: reference solution, spoiled reference, no-op; and tau2's fast scorer, proven.

    python -m benchmarks.targets tau2 bfcl agentdojo        # about two minutes on two cores
    PYTHONPATH=. TRACE_TOOLSANDBOX=... python -m benchmarks.targets toolsandbox
    python -m benchmarks.targets scorer                     # about four minutes

Columns: tasks; how many the reference solution solves; how many are still solved when the reference's last successful
write is left out, of how many that have one; how many an agent solves that only apologises. Exceptions follow below.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from environments.contract import SPLITS, Action, Environment, TargetTask, ToolCall
from environments.targets.bfcl.single.target import SingleTurnEnvironment
from environments.targets.catalogue import load_target
from environments.targets.reference_check import no_op, oracle, play, validate

GROUPS = {
    "tau2": ("tau2:airline", "tau2:retail", "tau2:telecom"),
    "bfcl": (
        *("bfcl:base", "bfcl:long_context", "bfcl:miss_func", "bfcl:miss_param"),
        *("bfcl:single", "bfcl:single:live"),
    ),
    "agentdojo": ("agentdojo:workspace", "agentdojo:travel", "agentdojo:banking", "agentdojo:slack"),
    "toolsandbox": ("toolsandbox",),
    "augmented": ("toolsandbox:augmented",),
}


def _tasks(target: Any) -> list[TargetTask]:
    return [task for split in SPLITS for task in target.tasks(split)]


def _last_write(environment: Any, task: TargetTask) -> list[Any] | None:
    """Payload entry that makes the oracle leave out the last write that succeeds; None when there is none."""
    environment.reset(task)
    if hasattr(environment, "reference"):  # tau2
        from environments.targets.tau2.data import load_data
        from environments.targets.tau2.scoring import gold_records
        from environments.targets.tau2.world import load_domain, official_task

        domain = load_domain(environment._data.domain)
        official = official_task(load_data(domain.name, "scripted"), task.id)
        gold = official.evaluation_criteria.actions or []
        for index in reversed([i for i, (_, writes) in enumerate(environment.reference()) if writes]):
            criteria = official.evaluation_criteria.model_copy(update={"actions": gold[:index] + gold[index + 1 :]})
            spoiled = official.model_copy(update={"evaluation_criteria": criteria})
            if gold_records(domain, spoiled) != gold_records(domain, official):
                return [index]
        return None
    if task.id.startswith("multi_turn"):
        last = [(turn, len(calls) - 1) for turn, calls in enumerate(environment._gold) if calls]
        return [list(last[-1])] if last else None
    if isinstance(environment, SingleTurnEnvironment):
        return [len(task.payload["reference"]) - 1] if task.payload["reference"] else None
    if hasattr(environment, "_milestones"):
        from environments.targets.toolsandbox.oracle import is_spoken

        silent = [index for index, item in enumerate(environment._milestones) if not is_spoken(item)]
        return silent[-1:] or None
    if not hasattr(environment, "_reference"):  # a target of one's own: nothing says which of its calls write
        return None
    writes = [index for index, writes in enumerate(environment._reference.writes) if writes]
    return writes[-1:] or None


def table(names: Sequence[str]) -> None:
    """Print one row per target and the exceptions."""
    print(f"{'target':24} {'tasks':>5} {'oracle':>6} {'spoiled':>11} {'no-op':>5} {'mean':>6} {'seconds':>7}")
    notes = []
    for name in names:
        start, target = time.perf_counter(), load_target(name, "scripted")
        tasks, environment = _tasks(target), target.environment()
        solved, nothing = validate(target, oracle), validate(target, no_op)
        kept, spoilable = [], 0
        for task in tasks:
            without = _last_write(environment, task)
            if without is not None:
                spoilable += 1
                if play(environment, replace(task, payload={**task.payload, "without": without}), oracle).reward == 1.0:
                    kept.append(task.id)
        seconds = time.perf_counter() - start
        print(
            f"{name:24} {len(tasks):5} {solved.successes:6} {len(kept):4} of {spoilable:3} {nothing.successes:5} "
            f"{nothing.mean_reward:6.3f} {seconds:7.1f}",
            flush=True,
        )
        if solved.failed:
            notes.append(f"{name}: reference fails on {', '.join(solved.failed)}")
        if kept:
            notes.append(f"{name}: still solved when spoiled: {', '.join(kept)}")
        if skipped := getattr(target, "skipped", 0):
            notes.append(f"{name}: {skipped} more need the network and a key")
    print("\n".join(notes))


def mixed_player(target: Any, draw: random.Random) -> Any:
    """Reference actions, actions of other tasks, nonsense and talk, at random."""
    environment, pool = target.environment(), []
    for task in draw.sample(_tasks(target), 4):
        environment.reset(task)
        pool += [ToolCall(a.name, a.arguments) for a in environment._gold if a.requestor == "assistant"]

    def player(environment: Environment) -> Action | None:
        kind = draw.random()
        if kind < 0.5:
            return environment.oracle()
        if kind < 0.7 and pool:
            return Action(tool_calls=(draw.choice(pool),))
        if kind < 0.75:
            return Action(tool_calls=(ToolCall("no_such_tool", {"x": 1}),))
        return Action(content=draw.choice(["Done.", "Anything else?", "Please use toggle_data.", "reboot device"]))

    return player


def scorer(domains: list[str]) -> None:
    """The fast scorer against the official one, on reference, spoiled and mixed episodes; warm caches for both."""
    from environments.targets.tau2.target import Tau2Environment

    print(f"{'target':14} {'episodes':>8} {'equal':>6} {'reward 1':>8} {'official ms':>11} {'fast ms':>8} {'ratio':>6}")
    for name in domains:
        target, draw = load_target(name, "scripted"), random.Random(name)
        environment, tasks = target.environment(), _tasks(target)
        assert isinstance(environment, Tau2Environment)
        count = {"tau2:airline": 80, "tau2:retail": 200, "tau2:telecom": 240}[name]
        play(environment, tasks[0], oracle)
        environment.official_reward()
        equal, ones, fast_time, official_time = 0, 0, 0.0, 0.0
        for number in range(count):
            task = tasks[number % len(tasks)]
            if number % 4 == 0:
                play(environment, task, oracle)
            elif number % 4 == 1:
                without = _last_write(environment, task) or []
                play(environment, replace(task, payload={**task.payload, "without": without}), oracle)
            else:
                play(environment, task, mixed_player(target, draw))
            start = time.perf_counter()
            fast = environment.score().reward
            middle = time.perf_counter()
            official = environment.official_reward()
            official_time += time.perf_counter() - middle
            fast_time += middle - start
            equal, ones = equal + (fast == official), ones + (official == 1.0)
        milliseconds = 1000 / count
        print(
            f"{name:14} {count:8} {equal:6} {ones:8} {official_time * milliseconds:11.1f} "
            f"{fast_time * milliseconds:8.2f} {official_time / fast_time:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    for group in sys.argv[1:] or ["tau2", "bfcl", "agentdojo"]:
        if group == "scorer":
            scorer(list(GROUPS["tau2"]))
        elif group.startswith("scorer:"):
            scorer([group.partition(":")[2]])
        else:
            table(GROUPS.get(group, (group,)))
