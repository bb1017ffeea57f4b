"""A target that a random model solves now and then: one message, right when its letters add up to the task's kind.

Two families, each of a capability of its own; an adapter trained for a step or two answers differently, not better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.contract import Action, Check, Message, Observation, Score, TargetTask
from environments.targets.third_party.adapter import of_split

FAMILIES = {"low": ("say_low_letters",), "high": ("say_high_letters",)}
# A family of the shift test alone, solved as `high` is.
NEEDS = {**FAMILIES, "both": ("say_high_letters",)}
# The prompt is one sentence: whoever adds worked examples adds most of it.
FIRST = {"diagnosis": 100, "validation": 200, "test": 300}
SIZE = 10
SHIFTED = 4


def made(split: str, n: int, family: str = "") -> TargetTask:
    family = family or ("low", "high")[n % 2]
    return TargetTask(f"{split}-{family}-{n}", split, family, n, {"n": n}, NEEDS[family])


class Letters:
    tools = ()
    instructions = "Say letters."
    examples: Sequence[Message] = ()
    max_steps = 2

    def reset(self, task: TargetTask) -> Observation:
        self.task, self.said = task, ""
        return Observation((Message("user", f"letters {task.payload['n']}"),))

    def step(self, action: Action) -> Observation:
        self.said += action.content + action.malformed
        return Observation((), done=True)

    def score(self) -> Score:
        right = sum(map(ord, self.said)) % 3 == (0 if self.task.family == "low" else 1)
        checks = [Check("said", FAMILIES[f][0], f == self.task.family, right) for f in FAMILIES]
        return Score(float(right), right, tuple(checks))

    def oracle(self) -> Action | None:
        return None

    def close(self) -> None:
        return


class LettersTarget:
    name = "tests.tasks.methods.letters_target:target"
    licence = "Apache-2.0"
    data_hash = "letters-1"
    user = "none"

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return of_split([made(s, first + i) for s, first in FIRST.items() for i in range(SIZE)], split)

    def shift_test(self) -> Sequence[TargetTask]:
        return [made("test", n, "both") for n in range(400, 400 + SHIFTED)]

    def environment(self) -> Letters:
        return Letters()

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return FAMILIES

    def generate(self, family: str, seed: int) -> TargetTask:
        return made("generated", 1000 + seed, family)


class SolvedLetters(Letters):
    def oracle(self) -> Action | None:
        """The letter that fits."""
        return None if self.said else Action("c" if self.task.family == "low" else "a")


class SolvedLettersTarget(LettersTarget):
    """The same with reference solutions."""

    name = "tests.tasks.methods.letters_target:solved"

    def environment(self) -> Letters:
        return SolvedLetters()


target = LettersTarget()
solved = SolvedLettersTarget()
