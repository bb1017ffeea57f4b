"""A target that a random model learns within a few steps: one message, which has to begin with a small letter in one of
two families, and may be anything in the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.contract import Action, Check, Message, Observation, Score, TargetTask
from environments.targets.third_party.adapter import of_split

FAMILIES = {"small": ("begin_with_a_letter",), "any": ("say_anything",)}
FIRST = {"diagnosis": 100, "validation": 200, "test": 300}
SIZE = 24


def made(split: str, n: int, family: str = "") -> TargetTask:
    family = family or tuple(FAMILIES)[n % 2]
    return TargetTask(f"{split}-{family}-{n}", split, family, n, {"n": n}, FAMILIES[family])


class Letter:
    tools = ()
    instructions = "Say characters."
    examples: Sequence[Message] = ()
    max_steps = 2

    def reset(self, task: TargetTask) -> Observation:
        self.task, self.said = task, ""
        # With its number: the router learns from how far openings of one kind lie apart.
        return Observation((Message("user", f"Say {task.family} {task.payload['n']}."),))

    def step(self, action: Action) -> Observation:
        self.said += action.content + action.malformed
        return Observation((), done=True)

    def score(self) -> Score:
        right = self.task.family == "any" or "a" <= self.said[:1] <= "z"
        checks = [Check("said", needs[0], family == self.task.family, right) for family, needs in FAMILIES.items()]
        return Score(float(right), right, tuple(checks))

    def oracle(self) -> Action | None:
        return None

    def close(self) -> None:
        return


class LetterTarget:
    name = "tests.integration.storage.letter_target:target"
    licence = "Apache-2.0"
    data_hash = "letter-1"
    user = "none"

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return of_split([made(s, first + i) for s, first in FIRST.items() for i in range(SIZE)], split)

    def environment(self) -> Letter:
        return Letter()

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return FAMILIES

    def generate(self, family: str, seed: int) -> TargetTask:
        return made("generated", 1000 + seed, family)


target = LetterTarget()
