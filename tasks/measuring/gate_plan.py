"""What the gate fixes before the first evaluation episode: its rules, its tasks, the level that a look may spend, and
how a p-value is written.

A split that a target draws anew every round is looked at once and has the whole level. A fixed split is looked at again
and again, so its level is spent over the looks: the n-th has alpha x 6 / (pi n)^2, and the sum over all looks is alpha,
however many there will be. The first look has its share too (0.61 alpha): with the whole alpha the later ones would
have nothing left.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Families that may seem to fall in one evaluation and be settled: more of them are no accident.
SETTLED = 3
# Episodes of the same tasks in place of one on a further task: they say less of the family (`benchmarks/settling.py`).
AGAIN = 2
# Validation tasks on which doing nothing is tried: it decides nothing, and what pays for it pays for it on any of them.
NOOP_TASKS = 40
# How the reason begins why a family is left to what answers it today: it decides nothing more.
LEFT = "With the router as it was fitted first,"


@dataclass(frozen=True)
class GateRules:
    """Levels of the gate; points are percentage points of success.

    `alpha` is that of a whole split, of which a look spends its share (`alpha_at`). `margin` is the fall that counts as
    none. `fall_confidence` is two-sided, so 0.90 calls a fall real at one-sided 5 %: missing a regression costs more
    than evaluating again. `worthwhile` is the gain that an evaluation should be able to see. `settled` is how many
    families may seem to fall and be settled by playing more of them: `settling` further tasks of each, or `AGAIN`
    times as many episodes of the tasks that there are, and no fewer of a task than it was first given (0: none).
    ValueError for a level that cannot be one."""

    alpha: float = 0.05
    margin: float = 2.0
    worthwhile: float = 5.0
    fall_confidence: float = 0.90
    settled: int = SETTLED
    settling: int = 0

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("fall_confidence", self.fall_confidence)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value!r}; it is a probability, give a number between 0 and 1")
        for name, value in (("margin", self.margin), ("worthwhile", self.worthwhile)):
            if not 0 <= value <= 100:
                raise ValueError(f"{name} is {value!r}; it is in percentage points, give a number from 0 to 100")


@dataclass(frozen=True)
class Look:
    """A look at a split: the level `alpha` that it may spend (`alpha_at`), and its `number` from 1. ValueError for an
    `alpha` that is no level."""

    alpha: float
    number: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(
                f"alpha is {self.alpha!r}; it is the level that a look may spend, give a number between 0 and 1"
            )


@dataclass(frozen=True)
class GatePlan:
    """Everything that decides a round's verdicts besides the outcomes; stored before the first evaluation episode.

    `own` names the capabilities tried and the families that each is about (empty: unknown, all tasks are its own).
    `tasks` are the ids of the split's tasks and of `further` ones, and `trials` the episodes of each. `look` counts the
    looks at this split and draw from 1; `drawn` says that the split was drawn for this round. `gains` are the points
    that each capability gained on fresh seeds over the best that answers today, and `further` the ids of the tasks
    drawn to find them, which count for own families and family by family alone."""

    rules: GateRules
    own: Mapping[str, tuple[str, ...]]
    tasks: tuple[str, ...]
    trials: int
    look: int = 1
    drawn: bool = False
    gains: Mapping[str, float] = field(default_factory=dict)
    further: tuple[str, ...] = ()

    @property
    def alpha(self) -> float:
        """The level that this look may spend."""
        return alpha_at(self.look, self.rules.alpha, self.drawn)

    @property
    def sha256(self) -> str:
        """Hex digest of the plan; equal plans have equal ones, in whatever order they were put together."""
        return rules_sha256(self.as_json())

    def as_json(self) -> dict[str, Any]:
        """The plan for a JSON column; what has no order is sorted."""
        plan = {
            "rules": asdict(self.rules),
            "own": {name: sorted(families) for name, families in sorted(self.own.items())},
            "tasks": sorted(self.tasks),
            "trials": self.trials,
            "look": self.look,
            "drawn": self.drawn,
            "alpha": self.alpha,
            "gains": dict(sorted(self.gains.items())),
        }
        # Only where there are any: a plan without them keeps the hash that an earlier version stored.
        return plan | ({"further": sorted(self.further)} if self.further else {})


def alpha_at(look: int, alpha: float, drawn: bool = False) -> float:
    """The level of the `look`-th look (from 1) at one split whose whole level is `alpha`.

    `drawn`: the split was drawn for this round alone, so its one look has all of it. ValueError for a look below 1 and
    for a second look at a drawn split, which has nothing left to spend."""
    if look < 1:
        raise ValueError(f"look {look!r} does not exist; looks are counted from 1")
    if not drawn:
        return alpha * 6 / (math.pi * look) ** 2
    if look > 1:
        raise ValueError(f"look {look} at a drawn split: its first look spent the whole level; draw other tasks")
    return alpha


def settling_episodes(own_tasks: int, trials: int, families: Collection[int] = ()) -> int:
    """The most episodes of both sides that settle as many falls as one evaluation may. `families` are how many tasks
    each family has: a large one is played whole once more, a smaller one in `AGAIN` times `own_tasks` x `trials`
    episodes. A target that draws plays half as many of further tasks, where it has so many left."""
    if not own_tasks:
        return 0
    largest = [*sorted(families, reverse=True), *[0] * SETTLED][:SETTLED]
    return 2 * trials * sum(max(AGAIN * own_tasks, size) for size in largest)


def noop_tasks(tasks: int) -> int:
    """On how many of so many validation tasks doing nothing is tried."""
    return min(tasks, NOOP_TASKS)


def rules_sha256(rules: GateRules | Mapping[str, Any]) -> str:
    """Hex SHA-256 of rules (or of a plan as JSON), written as canonical JSON. ValueError for what JSON cannot hold."""
    content = asdict(rules) if isinstance(rules, GateRules) else rules
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def p_phrase(p: float, digits: int = 3) -> str:
    """`p = 0.012` or `p < 0.0001`."""
    text = p_text(p, digits)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def p_text(p: float, digits: int = 3) -> str:
    """A p-value as text, to the digits that a permutation test gives: four below 0.01, else `digits`. Never 0, which no
    test gives."""
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.{digits}f}"
