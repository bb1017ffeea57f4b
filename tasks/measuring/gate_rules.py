"""The gate: which adapters may become champion (method, section 7), and why, in sentences.

The rule. For every capability that was tried, the base model and the base model with its adapter played the same
held-out tasks with the same seeds.

1. *Better*: over the capability's own families (all tasks where it has none) the paired difference is positive and its
   p-value, after Holm over all capabilities tried, is at most alpha.
2. *Nothing else falls*, looked at family by family and for all other families together (which has the power that a
   small family lacks). A fall of at most `margin` points is none. A larger one is
   - a **regression** when it is distinguishable from noise: its paired interval lies below zero;
   - **unclear** when it is not, but is larger than one task of the family (100 / tasks points). It blocks all the
     same, as `underpowered`: what cannot be excluded is not promoted;
   - within the family's resolution when it is at most one task: it passes, and the reasons say so. So a family of ten
   tasks blocks from the second task lost, a family of hundred from two points, and the pool of all other families
   catches many falls of one task each.
3. A regression outranks everything. An adapter that is not better is `underpowered` when its difference is positive
   and the test could not have found a worthwhile gain (minimum detectable effect above `worthwhile`, or too few tasks
   for any p-value to pass), else `rejected-not-better`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from tasks.measuring.statistics import PairedDifference, holm, minimum_detectable_effect, paired_difference


class GateVerdict(StrEnum):
    """What the gate says of one adapter."""

    PROMOTED = "promoted"
    NOT_BETTER = "rejected-not-better"
    REGRESSION = "rejected-regression"
    UNDERPOWERED = "underpowered"


@dataclass(frozen=True)
class GateRules:
    """Levels of the gate; points are percentage points of success.

    `fall_confidence` is two-sided, so 0.90 calls a fall real at one-sided 5 %: missing a regression costs more than
    evaluating again. `worthwhile` is the gain that an evaluation should be able to see.
    """

    alpha: float = 0.05
    margin: float = 2.0
    worthwhile: float = 5.0
    fall_confidence: float = 0.90


@dataclass(frozen=True)
class GateDecision:
    """The verdict on one capability's adapter with every figure behind it; `families` holds the other families,
    and `together` all of them at once (None when there is no other family)."""

    capability: str
    verdict: GateVerdict
    reasons: tuple[str, ...]
    difference: PairedDifference
    adjusted_p: float
    mde: float
    families: Mapping[str, PairedDifference]
    together: PairedDifference | None

    @property
    def promoted(self) -> bool:
        return self.verdict is GateVerdict.PROMOTED


def gate(
    pairs: Mapping[str, pd.DataFrame], own: Mapping[str, Collection[str]], rules: GateRules | None = None
) -> dict[str, GateDecision]:
    """Decides on all capabilities tried in a round at once, because Holm's correction is over all of them.

    `pairs[capability]` has one row per episode pair: task, family, base, other (outcomes in [0, 1], NaN where errored;
    as `statistics.align` makes them), `other` being the base model with this capability's adapter. `own[capability]`
    are the families that the capability is about; empty or missing means unknown: then all tasks are its own, and
    every family is looked at for falls. Raises ValueError when a capability has no pair of its own families."""
    rules = rules or GateRules()
    own_pairs = {name: _own(name, frame, own.get(name, ())) for name, frame in pairs.items()}
    differences = {name: paired_difference(f["base"], f["other"], f["task"]) for name, f in own_pairs.items()}
    adjusted = dict(zip(differences, holm([d.p for d in differences.values()]).tolist(), strict=True))
    return {
        name: _decide(name, own_pairs[name], frame, own, (differences[name], adjusted[name], len(pairs)), rules)
        for name, frame in pairs.items()
    }


def _own(name: str, frame: pd.DataFrame, families: Collection[str]) -> pd.DataFrame:
    rows = frame[frame["family"].isin(list(families))] if families else frame
    if rows.empty:
        present = sorted(frame["family"].astype(str).unique())
        raise ValueError(f"capability {name!r} has no episode of its families {sorted(families)}; evaluated: {present}")
    return rows


def _decide(
    name: str,
    mine: pd.DataFrame,
    frame: pd.DataFrame,
    own: Mapping[str, Collection[str]],
    result: tuple[PairedDifference, float, int],
    rules: GateRules,
) -> GateDecision:
    difference, adjusted, tried = result
    mde = minimum_detectable_effect(mine["base"], mine["other"], mine["task"], alpha=rules.alpha / tried)
    others = frame[~frame["family"].isin(list(own.get(name, ())))]
    families = {
        str(family): paired_difference(rows["base"], rows["other"], rows["task"], rules.fall_confidence)
        for family, rows in others.groupby("family", sort=True, observed=True)
        if _finished_by_both(rows)
    }
    unseen = sorted(set(others["family"].astype(str)) - set(families))
    together = (
        paired_difference(others["base"], others["other"], others["task"], rules.fall_confidence) if families else None
    )
    falls = dict(families) | ({"all other families together": together} if together and len(families) > 1 else {})
    verdicts = {family: _fall(family, fall, rules) for family, fall in falls.items()}

    reasons = [_gain_sentence(difference, adjusted, tried, rules)]
    reasons += [sentence for _, sentence in verdicts.values() if sentence]
    reasons += [
        f"{family}: no task was finished by both sides, so a fall there cannot be excluded." for family in unseen
    ]
    better = difference.points > 0 and adjusted <= rules.alpha
    if any(kind == "regression" for kind, _ in verdicts.values()):
        verdict = GateVerdict.REGRESSION
    elif not better:
        verdict, why = _not_better(difference, mde, tried, rules)
        reasons.append(why)
    elif unseen or any(kind == "unclear" for kind, _ in verdicts.values()):
        verdict = GateVerdict.UNDERPOWERED
    else:
        verdict = GateVerdict.PROMOTED
        reasons.append(
            f"No other family fell by more than {rules.margin:g} points or one task."
            if families
            else "There is no other family that could have fallen."
        )
    return GateDecision(name, verdict, tuple(reasons), difference, adjusted, mde, families, together)


def _finished_by_both(rows: pd.DataFrame) -> bool:
    return bool(set(rows.loc[rows["base"].notna(), "task"]) & set(rows.loc[rows["other"].notna(), "task"]))


def _gain_sentence(difference: PairedDifference, adjusted: float, tried: int, rules: GateRules) -> str:
    passed = difference.points > 0 and adjusted <= rules.alpha
    return (
        f"Its own tasks: {difference.points:+.1f} points over {difference.tasks} tasks "
        f"(95 % interval {difference.low:+.1f} to {difference.high:+.1f}), p = {difference.p:.4f}, "
        f"{adjusted:.4f} after Holm over {tried} tried: "
        f"{'significant' if passed else 'not significant'} at {rules.alpha:g}."
    )


def _not_better(difference: PairedDifference, mde: float, tried: int, rules: GateRules) -> tuple[GateVerdict, str]:
    if difference.points <= 0:
        return GateVerdict.NOT_BETTER, "Its own tasks did not gain."
    if difference.floor_p * tried > rules.alpha:
        return GateVerdict.UNDERPOWERED, (
            f"{difference.tasks} tasks cannot give a p-value below {difference.floor_p:.4f}, so no gain could have "
            "passed; evaluate on more tasks."
        )
    if mde > rules.worthwhile:
        return GateVerdict.UNDERPOWERED, (
            f"Only a gain of {mde:.1f} points or more would have been found with 80 % power, and {rules.worthwhile:g} "
            "would be worth having; evaluate on more tasks."
        )
    return GateVerdict.NOT_BETTER, f"A gain of {mde:.1f} points would have been found with 80 % power, and was not."


def _fall(family: str, change: PairedDifference, rules: GateRules) -> tuple[str, str]:
    """("held" | "regression" | "unclear" | "within"), and its sentence ("" when held)."""
    fall, one_task = -change.points, 100 / change.tasks
    if fall <= rules.margin + 1e-9:
        return "held", ""
    level = f"{100 * rules.fall_confidence:.0f} % interval {change.low:+.1f} to {change.high:+.1f}"
    if change.high < 0:
        return "regression", f"{family}: fell by {fall:.1f} points over {change.tasks} tasks ({level}, below zero)."
    if fall > one_task + 1e-9:
        return "unclear", (
            f"{family}: fell by {fall:.1f} points over {change.tasks} tasks ({level}); this may be noise but is more "
            "than one task, so it blocks until more trials or tasks tell."
        )
    return (
        "within",
        f"{family}: fell by {fall:.1f} points, at most one of its {change.tasks} tasks ({level}): "
        "within its resolution.",
    )
