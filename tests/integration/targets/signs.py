"""A target for models with random weights: a whole round needs a base that now and then succeeds.

The user asks for a number. The number is right, and so is noise: three characters beyond ASCII. A quarter to a third of
the answers of tiny random models have them within six tokens, and GRPO can make them more frequent; no attack of the
red team and no simple policy writes any. This proves that a round runs, never that it learns anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import SPLITS, Action, Check, Message, Observation, Score, TargetTask

FAMILY, CAPABILITY = "signs", "answer_in_signs"
SIGNS = 3
SIZE = 24
# Numbers of training begin behind those of all splits.
FIRST = SIZE * len(SPLITS)


class Signs:
    """One question, one answer."""

    tools: Sequence[Any] = ()
    instructions = "Answer."
    examples: Sequence[Message] = ()
    max_steps = 1

    def reset(self, task: TargetTask) -> Observation:
        self._number, self._answer = str(task.payload["number"]), ""
        return Observation((Message("user", f"Say {self._number}."),))

    def step(self, action: Action) -> Observation:
        self._answer = (action.content or action.malformed).strip()
        return Observation((), done=True)

    def score(self) -> Score:
        """The reward is the share of the signs that are there; all of it is success."""
        signs = SIGNS if self._answer == self._number else sum(ord(c) > 127 for c in self._answer)
        right = signs >= SIGNS
        return Score(min(1.0, signs / SIGNS), right, (Check("signs", CAPABILITY, True, right, f"{signs} signs"),))

    def oracle(self) -> Action | None:
        return None if self._answer else Action(content=self._number)

    def close(self) -> None:
        return


class SignsTarget:
    """Two dozen tasks a split, and as many to train on as are asked for."""

    name = "signs"
    licence = "Apache-2.0"
    data_hash = "signs-1"
    user = "none"

    def tasks(self, split: str) -> Sequence[TargetTask]:
        first = SIZE * SPLITS.index(split)
        return [_task(split, first + n) for n in range(SIZE)]

    def environment(self) -> Signs:
        return Signs()

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {FAMILY: (CAPABILITY,)}

    def generate(self, family: str, seed: int) -> TargetTask:
        return _task("training", FIRST + seed)


def _task(split: str, number: int) -> TargetTask:
    return TargetTask(f"signs-{number}", split, FAMILY, number, {"number": number}, (CAPABILITY,))


def target() -> SignsTarget:
    """The target `tests.integration.targets.signs:target`."""
    return SignsTarget()
