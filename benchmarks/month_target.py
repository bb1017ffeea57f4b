"""The target of `benchmarks.month`: one message, which a random model gets right now and then, and an adapter learns.

Two families, each of a capability of its own. An answer is right when it has a letter beyond ASCII, as most answers of
a random model have, and the number of its first letter leaves 0 (`zero`) or 1 (`one`) when it is divided by 4. The
reference solution says the task's own number instead, so that it solves no other task: scripted policies and attacks,
which speak ASCII, solve none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.contract import Action, Check, Message, Observation, Score, TargetTask
from environments.targets.third_party.adapter import of_split

FAMILIES: Mapping[str, tuple[str, ...]] = {"zero": ("begin_with_zero",), "one": ("begin_with_one",)}
FIRST = {"diagnosis": 100, "validation": 300, "test": 500}
SIZE = 32
MARK = "☃"


def made(split: str, n: int, family: str) -> TargetTask:
    return TargetTask(f"{split}-{family}-{n}", split, family, n, {"n": n}, FAMILIES[family])


class Beginnings:
    """One question, one answer."""

    tools = ()
    instructions = "Say letters."
    examples: Sequence[Message] = ()
    max_steps = 2

    def reset(self, task: TargetTask) -> Observation:
        self.task, self.said = task, ""
        return Observation((Message("user", f"{task.family} {task.payload['n']}"),))

    def step(self, action: Action) -> Observation:
        self.said = self.said or (action.content + action.malformed).strip()
        return Observation((), done=True)

    def score(self) -> Score:
        if MARK in self.said:
            right = self.said == f"{MARK}{self.task.payload['n']}"
        else:
            left = list(FAMILIES).index(self.task.family)
            right = not self.said.isascii() and ord(self.said[0]) % 4 == left
        checks = [Check("said", needs[0], family == self.task.family, right) for family, needs in FAMILIES.items()]
        return Score(float(right), right, tuple(checks))

    def oracle(self) -> Action | None:
        return Action(f"{MARK}{self.task.payload['n']}") if not self.said else None

    def close(self) -> None:
        return


class BeginningsTarget:
    """Sixteen tasks of a family in each split, and as many more as one wants to train on."""

    name = "benchmarks.month_target:target"
    licence = "Apache-2.0"
    data_hash = "beginnings-1"
    user = "none"

    def tasks(self, split: str) -> Sequence[TargetTask]:
        names = list(FAMILIES)
        return of_split([made(s, first + i, names[i % 2]) for s, first in FIRST.items() for i in range(SIZE)], split)

    def environment(self) -> Beginnings:
        return Beginnings()

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return FAMILIES

    def generate(self, family: str, seed: int) -> TargetTask:
        return made("generated", 1000 + seed, family)


target = BeginningsTarget()
