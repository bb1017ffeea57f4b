"""Splits, draws and training scenarios of a target whose tasks a program makes from a family and a number.

What a task may be used for is decided by its content (what it asks and what solves it): half of all contents, by their
hash, are for training, the other half for evaluation, so that nothing of what is trained on is ever measured, and no
record of it is needed. No content stands in two splits or in the draws of two rounds of one home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from environments.contract import DRAWN_SPLITS, Draw, TargetTask, content_hash
from environments.picking import for_training, in_turn
from errors import TargetError

# The task of a family and a number, equal for equal ones; None where that number makes no task.
Make = Callable[[str, int], TargetTask | None]
# Where each split's numbers begin, then those of training, then the rounds' draws.
FIRST_NUMBER: Mapping[str, int] = {"test": 0, "diagnosis": 100_000, "validation": 200_000}
NUMBERS_OF_A_SPLIT = 100_000
FRESH_NUMBER = 1_000_000
FRESH_SEEDS = 10**10
# Numbers that a training seed looks among: that none of them is for training happens in one of 10^19 seeds.
ATTEMPTS = 64
DRAWN_NUMBER = FRESH_NUMBER + FRESH_SEEDS * ATTEMPTS
NUMBERS_OF_A_ROUND = 2**16
ROUNDS = 2**24


@dataclass(frozen=True)
class Source:
    """The numbers that tasks are looked for among, and what is said where they are not enough: where the family's other
    questions are, and what to do."""

    numbers: Iterator[int]
    short: str


class Procedural:
    """The tasks of some families: `per_family` of each in every split. `content` gives a task's content as a hash."""

    def __init__(
        self, families: Sequence[str], make: Make, content: Callable[[TargetTask], str], per_family: int
    ) -> None:
        self.families, self._make, self._content, self._per_family = families, make, content, per_family

    def check(self) -> None:
        """Raise TargetError where a family has too few questions for the fixed splits and one round's draw: it is found
        here, not in the first round."""
        self._drawn(Draw(0, 0))

    @cached_property
    def fixed(self) -> Mapping[str, tuple[TargetTask, ...]]:
        """The tasks of every split that are the same in every round, of all families from the first on."""
        taken: set[str] = set()
        return {split: self._all(split, partial(_of_split, split), taken, self._per_family) for split in FIRST_NUMBER}

    def drawn(self, split: str, chosen: Draw) -> tuple[TargetTask, ...]:
        """See `Drawable.drawn`."""
        if split not in DRAWN_SPLITS:
            raise TargetError(f"split {split!r} is not drawn; rounds draw {' and '.join(DRAWN_SPLITS)}")
        return self._drawn(chosen)[split]

    def further(self, chosen: Draw, family: str, count: int) -> tuple[TargetTask, ...]:
        """See `Drawable.further`."""
        drawn = [task for tasks in self._drawn(chosen).values() for task in tasks]
        taken = self._contents(drawn) | self._fixed_contents() | chosen.used
        return tuple(self._take(family, _of_round(chosen), "validation", taken, count)) if count else ()

    def fresh(self, family: str, seed: int) -> TargetTask:
        """A scenario to train on: the first for training among the numbers of its seed. Raises TargetError for a family
        without one."""
        first = FRESH_NUMBER + seed % FRESH_SEEDS * ATTEMPTS
        for number in range(first, first + ATTEMPTS):
            task = self._make(family, number)
            if task is not None and for_training(self._content(task)):
                return replace(task, id=f"{family}-{number}", split="generated")
        raise TargetError(f"family {family!r} has no scenario to train on at seed {seed}: its questions are too few")

    def further_apart(self, families: Sequence[str], make: Make, per_family: int) -> tuple[TargetTask, ...]:
        """`per_family` tasks of each of some families that another program makes, for a shift test: their contents are
        for evaluation and in no fixed split."""
        taken = self._fixed_contents()
        source = Source(_numbers(0, NUMBERS_OF_A_SPLIT), f"in the fixed splits. {_NOT_THIS}")
        found = [self._take(f, source, "test", taken, per_family, make) for f in families]
        return tuple(in_turn(found))

    def _drawn(self, chosen: Draw) -> Mapping[str, tuple[TargetTask, ...]]:
        taken = self._fixed_contents() | chosen.used
        sources = {family: _of_round(chosen) for family in self.families}
        return {
            split: self._all(split, lambda family: sources[family], taken, self._per_family) for split in DRAWN_SPLITS
        }

    def _all(self, split: str, source: Callable[[str], Source], taken: set[str], wanted: int) -> tuple[TargetTask, ...]:
        """`wanted` tasks of each family, of all families from the first on."""
        return tuple(in_turn([self._take(f, source(f), split, taken, wanted) for f in self.families]))

    def _take(
        self, family: str, source: Source, split: str, taken: set[str], wanted: int, make: Make | None = None
    ) -> list[TargetTask]:
        """Tasks on the first numbers of a source whose contents are for evaluation and not taken; what is taken
        grows."""
        tasks: list[TargetTask] = []
        while len(tasks) < wanted:
            number = next(source.numbers, None)
            if number is None:
                raise TargetError(
                    f"family {family!r} has {len(tasks)} questions left for the {split} split, which needs {wanted}: "
                    f"the others are for training or {source.short}"
                )
            task = (make or self._make)(family, number)
            content = self._content(task) if task is not None else ""
            if task is None or for_training(content) or content in taken:
                continue
            taken.add(content)
            tasks.append(replace(task, split=split))
        return tasks

    def _contents(self, tasks: Iterable[TargetTask]) -> set[str]:
        return {self._content(task) for task in tasks}

    def _fixed_contents(self) -> set[str]:
        return self._contents(task for tasks in self.fixed.values() for task in tasks)


def _numbers(first: int, count: int) -> Iterator[int]:
    return iter(range(first, first + count))


# What to do about a family that has too few questions even in a new home.
_NOT_THIS = "Leave the family out, or name more families beside it, so that a split needs fewer of each"


def _of_split(split: str, family: str) -> Source:
    """The numbers that a fixed split looks for its tasks among, the same for every family."""
    return Source(_numbers(FIRST_NUMBER[split], NUMBERS_OF_A_SPLIT), f"in another split. {_NOT_THIS}")


def _of_round(chosen: Draw) -> Source:
    """The numbers that a round looks for its tasks among, from the first."""
    place = (int(content_hash(chosen.seed, 8), 16) + chosen.number) % ROUNDS
    short = f"in the fixed splits and this draw. {_NOT_THIS}"
    if chosen.used:
        short = "in the fixed splits or in earlier rounds. Begin a new home (TRACE_HOME), or leave the family out"
    return Source(_numbers(DRAWN_NUMBER + place * NUMBERS_OF_A_ROUND, NUMBERS_OF_A_ROUND), short)
