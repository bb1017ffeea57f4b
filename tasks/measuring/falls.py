"""Whether success that should stay fell, as far as the tasks can tell.

A fall of at most `margin` points is none. A larger one is

- a **regression** when it is distinguishable from noise: its paired interval lies below zero;
- **unclear** when it is not, but is larger than one task (100 / tasks points). It blocks all the same: what cannot be
  excluded is not promoted. Playing more of a family settles it (`judge_settled`);
- **within** the resolution when it is at most one task: it passes, and the reasons say so. So ten tasks block from the
  second task lost, and a hundred from two points.

A task that one side lost to errors is in no difference, nor is a trial. What no task is left of is **unseen**, and
where the candidate lost more tasks than the live release (one that lacks some trials counts in part), by more than one
and by more than the margin, they are **lost**: they may be the very ones that it fails. Both block, because a fall
cannot be excluded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tasks.measuring.gate_plan import GateRules
from tasks.measuring.statistics import PairedDifference


class FallKind(StrEnum):
    """How a difference reads as a fall."""

    HELD = "held"
    REGRESSION = "regression"
    UNCLEAR = "unclear"
    WITHIN = "within"
    UNSEEN = "unseen"
    LOST = "lost"


BLOCKING = frozenset({FallKind.REGRESSION, FallKind.UNCLEAR, FallKind.UNSEEN, FallKind.LOST})


@dataclass(frozen=True)
class Fall:
    """What became of success somewhere: the kind, and its sentence ("" when it held)."""

    kind: FallKind
    reason: str = ""

    @property
    def blocks(self) -> bool:
        return self.kind in BLOCKING


def judge_fall(where: str, change: PairedDifference | None, rules: GateRules) -> Fall:
    """How `change` (with the interval of `rules.fall_confidence`) reads. None: no task was finished by both sides, so
    a fall cannot be excluded."""
    if change is None:
        return Fall(FallKind.UNSEEN, f"{where}: no task was finished by both sides, so a fall cannot be excluded.")
    fall, one_task = -change.points, 100 / change.tasks
    if fall <= rules.margin + 1e-9:
        return Fall(FallKind.HELD)
    level = f"{100 * rules.fall_confidence:.0f} % interval {change.low:+.1f} to {change.high:+.1f}"
    if change.high < 0:
        return Fall(
            FallKind.REGRESSION,
            f"{where}: fell by {fall:.1f} points over {change.tasks} tasks ({level}, below zero).",
        )
    if fall > one_task + 1e-9:
        return Fall(
            FallKind.UNCLEAR,
            f"{where}: fell by {fall:.1f} points over {change.tasks} tasks ({level}); this may be noise but is more "
            "than one task, so it blocks until more trials or tasks tell.",
        )
    return Fall(
        FallKind.WITHIN,
        f"{where}: fell by {fall:.1f} points, at most one of its {change.tasks} tasks ({level}): "
        "within its resolution.",
    )


def judge_lost(where: str, lost: tuple[float, float], tasks: int, rules: GateRules, who: str = "the candidate") -> Fall:
    """How the tasks read that each side lost to errors (the live release, and `who` may follow it) of so many; in part
    where it finished some trials: those that it lost may be the ones that it fails."""
    live, candidate = lost
    more = candidate - live
    if more <= 1 + 1e-9 or 100 * more / tasks <= rules.margin + 1e-9:
        return Fall(FallKind.HELD)
    return Fall(
        FallKind.LOST,
        f"{where}: {who} lost {candidate:.3g} of {tasks} tasks to errors, the live release {live:.3g}, "
        "so a fall cannot be excluded.",
    )


def judge_settled(
    where: str, first: PairedDifference | None, further: PairedDifference | None, rules: GateRules
) -> Fall:
    """How a fall that is unclear in the `first` episodes reads in `further` ones, which were played to tell and stand
    for them: the first were looked at for having fallen, so they overstate it."""
    settled = judge_fall(where, further, rules)
    if first is None or further is None:
        return settled
    told = f"{where}: {first.points:+.1f} points over {first.tasks} tasks, which may be noise, so both sides played "
    told += f"more: {further.points:+.1f} over {further.tasks}."
    return Fall(settled.kind, " ".join([told, settled.reason.removeprefix(f"{where}: ").capitalize()]).strip())
