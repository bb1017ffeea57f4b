"""Two sides that played the same tasks, whoever they are: what differs, how surely, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from db import open_stored
from errors import ConfigurationError
from settings import load_settings
from tasks.measuring.gate_plan import p_text
from tasks.measuring.outcomes import (
    Outcomes,
    common_data,
    families_of,
    is_evaluation,
    is_file,
    outcomes_of,
    read_outcomes,
)
from tasks.measuring.paired_tasks import PairedTasks
from tasks.measuring.statistics import Interval, PairedDifference, success_interval
from tasks.releases.lookup import target_named

NONE = "(no family)"


@dataclass(frozen=True)
class Side:
    """One side on the common tasks: `success` with its 95 % interval; `left_out` tasks that only this side has, and
    `lost` episodes without a result, both in no figure. `routed` of its tasks an adapter played because a router chose
    it for them."""

    name: str
    success: Interval
    left_out: int
    lost: int
    routed: int = 0


@dataclass(frozen=True)
class Comparison:
    """`b` minus `a` in percentage points over their common tasks. `mde` is the smallest true difference that 80 % of
    such comparisons would have found at 5 %. `families` is empty where there is only one. `pass_k` is the difference of
    pass^k, with `k` the number of trials that every common task has on both sides. `set_aside` common tasks of
    validation, by which releases and adapters are chosen, are in no figure; `validation_only`: there are no others.
    `older` are states of the target's data that a side was played on as well, and that are in no figure."""

    a: Side
    b: Side
    target: str
    data_hash: str
    difference: PairedDifference
    mde: float
    families: Mapping[str, PairedDifference]
    k: int
    pass_k: PairedDifference
    set_aside: int = 0
    older: tuple[str, ...] = ()
    validation_only: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The comparison as text."""
        width = max(12, len(self.a.name) + 2, len(self.b.name) + 2, *(len(f) + 2 for f in self.families))
        lines = [f"{self.target}, data {self.data_hash}"] if self.target else []
        lines.append(f"{'':<{width}} {'success':>8}  {'95 % interval':<16} {'tasks':>6} {'episodes':>9} {'lost':>5}")
        for side in (self.a, self.b):
            s = side.success
            interval = f"[{100 * s.low:.1f}, {100 * s.high:.1f}]"
            lines.append(
                f"{side.name:<{width}} {100 * s.rate:>6.1f} %  {interval:<16} {s.tasks:>6} {s.n:>9} {side.lost:>5}"
            )
        lines += ["", f"{'second - first':<{width}} {'points':>8}  {'95 % interval':<16} {'tasks':>6} {'p':>9}"]
        shown = {"all tasks": self.difference, **self.families}
        if self.k > 1:
            shown[f"pass^{self.k}"] = self.pass_k
        for name, d in shown.items():
            interval = f"[{d.low:+.1f}, {d.high:+.1f}]"
            lines.append(f"{name:<{width}} {d.points:>+8.1f}  {interval:<16} {d.tasks:>6} {p_text(d.p, 4):>9}")
        lines += ["", f"{self.difference.changed} of {self.difference.tasks} tasks differ."]
        lines.append(
            f"A true difference of {self.mde:.1f} points would have been found with 80 % power at 5 %."
            if self.mde < 100
            else "No true difference, however large, would have been found with 80 % power at 5 %: play more tasks."
        )
        if len(self.families) > 1:
            lines.append(
                "The p-values of families stand alone: the more families, the more of them are small by chance."
            )
        lines += [
            f"{side.name}: {side.left_out} tasks that the other lacks are left out."
            for side in (self.a, self.b)
            if side.left_out
        ]
        lines += [
            f"{side.name}: {side.routed} of its {side.success.tasks} tasks were played because a router chose it for "
            "them, so they are rather those that it solves; 'trace-agent evaluate' plays it alone."
            for side in (self.a, self.b)
            if side.routed
        ]
        if self.older:
            lines.append(
                f"Data {self.data_hash} are the newest that both were played on; what was played on "
                f"{', '.join(self.older)} is left out."
            )
        if self.set_aside:
            lines.append(f"{self.set_aside} validation tasks are left out: releases and adapters are chosen on these.")
        if self.validation_only:
            lines.append(
                "All are validation tasks, on which releases and adapters are chosen: the gain of what was chosen is "
                "overstated. The two share no test task."
            )
        return lines


def compare_named(a: str, b: str, target: str | None = None, home: Path | None = None) -> Comparison:
    """Compare two names as `trace-agent compare` takes them; the store is opened only where one is no file. What is
    stored of both is compared on the newest data that both were played on. Releases and adapters are of the target that
    is given or set, else of the newest round's.

    `ConfigurationError` or `StoreError` for what cannot be read or compared."""
    if is_file(a) and is_file(b):
        return compare(read_outcomes(Path(a)), read_outcomes(Path(b)))
    settings = load_settings(target=target, home=home)
    with open_stored(settings.database_url) as store:
        names = [what for what in (a, b) if not is_file(what)]
        of = settings.target if all(map(is_evaluation, names)) else target_named(store, settings)
        # A file does not say which data it is of.
        data = common_data(store, names, of) if len(names) == 2 else ""
        first, second = (
            outcomes_of(store, what, of, data) if what in names else read_outcomes(Path(what)) for what in (a, b)
        )
    return compare(first, second)


def compare(a: Outcomes, b: Outcomes) -> Comparison:
    """`b` against `a` on the tasks that both have; of releases and adapters not on those of validation, where there are
    others. `ConfigurationError` when they were played on different targets or
    data, share no task, or finished none of the shared ones."""
    for what, one, other in (("target", a.target, b.target), ("data hash", a.data_hash, b.data_hash)):
        if one and other and one != other:
            raise ConfigurationError(
                f"{a.name} and {b.name} are not comparable: the {what} of the first is {one}, of the second {other}; "
                "evaluate both on the same data"
            )
    tasks = [set(side.frame["task"]) for side in (a, b)]
    common = tasks[0] & tasks[1]
    if not common:
        examples = " and ".join(repr(min(played)) for played in tasks)
        raise ConfigurationError(
            f"{a.name} and {b.name} have no task in common (they have {examples}, among others); evaluate both on the "
            "same tasks"
        )
    families, gated = families_of([a, b]), common & (a.validation | b.validation)
    judged = common - gated or common
    frames = [side.frame[side.frame["task"].isin(judged)] for side in (a, b)]
    pair = pd.concat(
        [
            pd.DataFrame({"task": f["task"], "base": f["success"], "other": float("nan")}) if side == 0
            else pd.DataFrame({"task": f["task"], "base": float("nan"), "other": f["success"]})
            for side, f in enumerate(frames)
        ]
    )  # fmt: skip
    pair["family"] = pair["task"].map(families).replace("", NONE)
    table = PairedTasks.of("the comparison", pair)
    difference = table.difference()
    if difference is None:
        raise ConfigurationError(
            f"{a.name} and {b.name} finished none of their {len(judged)} common tasks both; play what was lost again"
        )
    # Every common task with a result on both sides has at least one trial there.
    trials = [min(x, y) for x, y in zip(table.base[1], table.other[1], strict=True) if min(x, y) > 0]
    k = int(min(trials))
    pass_k = table.pass_k(k)
    assert pass_k is not None
    sides = [
        Side(
            side.name,
            success_interval(frame),
            len(played - common),
            int(frame["success"].isna().sum()),
            len(judged & side.routed),
        )
        for side, frame, played in zip((a, b), frames, tasks, strict=True)
    ]
    by_family = {str(f): table.of_families({f}).difference() for f in sorted(table.names)}
    return Comparison(
        a=sides[0],
        b=sides[1],
        target=a.target or b.target,
        data_hash=a.data_hash or b.data_hash,
        difference=difference,
        mde=table.mde(0.05),
        families={f: d for f, d in by_family.items() if d is not None} if len(by_family) > 1 else {},
        k=k,
        pass_k=pass_k,
        set_aside=len(common - judged),
        older=tuple(sorted({*a.older, *b.older})),
        validation_only=gated == common,
    )
