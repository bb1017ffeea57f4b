"""A target of forty tasks for shared rollouts: two turns each, and a step that takes TRACE_TEST_STEP seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from environments.contract import Action, Message, Observation, Score, TargetTask

TASKS = tuple(TargetTask(f"m{n}", "diagnosis", "all", n, {"n": n}) for n in range(40))


class Many:
    """Answers whatever is said; the second turn ends it."""

    tools = ()
    instructions = "Count."
    examples: Sequence[Message] = ()
    max_steps = 3

    def reset(self, task: TargetTask) -> Observation:
        self.turns = 0
        return Observation((Message("user", f"Count {task.payload['n']}."),))

    def step(self, action: Action) -> Observation:
        time.sleep(float(os.environ.get("TRACE_TEST_STEP", "0")))
        self.turns += 1
        return Observation((Message("user", "And?"),), done=self.turns == 2)

    def score(self) -> Score:
        return Score(1.0, True)

    def oracle(self) -> Action | None:
        return None

    def close(self) -> None: ...


class ManyTarget:
    name = "many"
    licence = "Apache-2.0"
    data_hash = "many-1"
    user = "none"
    environment = Many

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return [task for task in TASKS if task.split == split]


target = ManyTarget()
NAME = f"{__name__}:target"
