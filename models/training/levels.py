"""The level of difficulty that a training is at: raised as the policy grows, so that about half of it succeeds.

The level of a step follows from the record of the step before it, which a checkpoint holds: a training that goes on
from a checkpoint is at the level that it would have been at.
"""

from __future__ import annotations

from typing import Protocol, Self, runtime_checkable

from models.training.records import StepRecord

# Success on own scenarios, without advice, from which the next step is a level harder, and up to which it is easier:
# the ends of the band that calibration asks for. Between them groups have the most to tell.
HARDER, EASIER = 0.6, 0.2


@runtime_checkable
class Dialled(Protocol):
    """A source of scenarios that is at `level` (0: the easiest) of `levels`; `at` gives the same one at another."""

    level: int
    levels: int

    def at(self, level: int) -> Self: ...


def levels_of(source: object) -> tuple[int, int]:
    """(level that a training begins at, number of levels); (0, 1) for a source without levels."""
    return (source.level, source.levels) if isinstance(source, Dialled) else (0, 1)


def following_level(record: StepRecord, levels: int) -> int:
    """The level of the step after `record`: at most one up or down."""
    if record.success is None:
        return record.level
    if record.success >= HARDER:
        return min(record.level + 1, levels - 1)
    return max(record.level - 1, 0) if record.success <= EASIER else record.level
