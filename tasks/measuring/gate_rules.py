"""The gate: what may answer users (method, section 7), and why, in sentences. Pure functions on frames of outcomes.

Two phases, on the same held-out tasks, trials and seeds, at the level that the look may spend (`gate_plan.alpha_at`).

**A, every capability that was tried** (`judge_capabilities`). *Incumbent*: the live release, routed as in production
(the bare base in round 1). *Challenger*: the capability's new adapter alone, without the router. It is `better` when
over the capability's own families (all tasks where it has none) the paired difference is positive and its p-value,
after Holm over all capabilities tried, is at most the look's level, unless the adapter lost tasks to errors that the
live release did not (`judge_lost`). A capability that no task of the split is about is `underpowered` and counts among
none of them: the others are judged as if it had not been tried. What the adapter alone does to all other families
decides nothing, because a router stands before it (`wrong_routes`).

**B, the assembled candidate** (`judge_release`): the live members, with those that passed and the router fitted for
exactly these, against the live release as a whole. It is promoted when

1. it is *better*: the difference over the split is positive, and significant over the split or over the own families of
   what passed (its gain is still there after routing);
2. *nothing falls*, by the rule of `falls`: overall, in any family, in all other families together (which has the power
   that a small family lacks), nor in pass^k. Further tasks, drawn where a gain was expected, count for own families and
   family by family alone: over several families they would weigh more than in production. Tasks that both sides answer
   with the very same episode differ by exactly zero, so what is not routed differently costs no power. A family that
   seems to fall and may not (`unclear_families`) is *settled*: both sides play more of it, further tasks where the
   target draws and its own tasks again where it does not, and those episodes alone say whether it fell. The first were
   looked at for having fallen: of twenty families of eight tasks, some lose two by chance. Tasks that the candidate
   lost to errors and the live release did not block as an unclear fall does (`judge_lost`).

A regression outranks everything. What is not better is `underpowered` when its difference is positive and the test
could not have found a worthwhile gain (minimum detectable effect above it, or too few tasks for any p-value to pass),
else `rejected-not-better`. What is better but may have lost something elsewhere is `underpowered` too, and so is what
could not be compared: where no task of the split was finished by both sides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import pandas as pd

from tasks.measuring.decisions import CapabilityDecision, GateVerdict, ReleaseDecision
from tasks.measuring.falls import FallKind, judge_fall, judge_lost, judge_settled
from tasks.measuring.gate_plan import LEFT, GateRules, Look, p_phrase, p_text
from tasks.measuring.paired_tasks import PairedTasks
from tasks.measuring.statistics import PairedDifference, holm

OVERALL, ELSEWHERE = "overall", "all other families together"
NOTHING_COMPARED = (
    "The candidate and the live release finished no validation task in common, so nothing was compared: errors took "
    "the other episodes. Mend what they were lost to (docs/2-database.md, question 3), then begin another round."
)


class _Watched(NamedTuple):
    """What may fall, and whether it is a family: one may be called as anything else that is watched."""

    name: str
    family: bool = False


def judge_capabilities(
    pairs: Mapping[str, pd.DataFrame],
    own: Mapping[str, Collection[str]],
    rules: GateRules,
    look: Look,
    gains: Mapping[str, float] | None = None,
) -> dict[str, CapabilityDecision]:
    """Phase A, on all capabilities tried in a round at once, because Holm's correction is over all of them.

    `pairs[capability]` has one row per task and trial: task, family, base (the live release's outcome), other (that of
    the adapter alone); outcomes in [0, 1], NaN where errored, as `statistics.align` makes them. `own[capability]` are
    the families that the capability is about; empty or missing means unknown: then all tasks are its own.
    `gains[capability]` is the gain in points on fresh seeds, over what answers today, for which the tasks were drawn:
    where it is above `rules.worthwhile` it is what the test has to be able to find. What has no task of its own
    families that both sides finished has no figures. ValueError for pairs that lack a column."""
    verdicts = {}
    tables = {name: PairedTasks.of(name, frame) for name, frame in pairs.items()}
    own_tasks = {name: table.of_families(own[name]) if own.get(name) else table for name, table in tables.items()}
    measured = {name: d for name, table in own_tasks.items() if (d := table.difference()) is not None}
    tried = len(measured)
    adjusted = dict(zip(measured, holm([d.p for d in measured.values()]).tolist(), strict=True))
    for name, table in own_tasks.items():
        if name not in measured:
            why = _unmeasured(table, own.get(name, ()))
            verdicts[name] = CapabilityDecision(
                name, GateVerdict.UNDERPOWERED, (why,), None, None, None, look.alpha, look.number, tried
            )
            continue
        difference, mde = measured[name], table.mde(look.alpha / tried)
        worthwhile = max(rules.worthwhile, (gains or {}).get(name, 0.0))
        better = difference.points > 0 and adjusted[name] <= look.alpha
        reasons = [
            f"Its own tasks, alone against the live release: {_figures(difference)}, {p_text(adjusted[name], 4)} after "
            f"Holm over {tried} tried: {_significant(better, look)}."
        ]
        verdict = GateVerdict.BETTER
        if not better:
            verdict, why = _not_better("Its own tasks", difference, mde, (look.alpha, tried, worthwhile))
            reasons.append(why)
        elif (lost := judge_lost("Its own tasks", table.lost(), len(table.families), rules, "the adapter")).blocks:
            verdict = GateVerdict.UNDERPOWERED
            reasons.append(lost.reason)
        verdicts[name] = CapabilityDecision(
            name, verdict, tuple(reasons), difference, adjusted[name], mde, look.alpha, look.number, tried
        )
    return verdicts


def judge_release(
    pair: pd.DataFrame,
    rules: GateRules,
    look: Look,
    trials: int,
    own: Mapping[str, Collection[str]],
    *,
    settled: pd.DataFrame | None = None,
    left: Mapping[str, str] | None = None,
    further: pd.DataFrame | None = None,
) -> ReleaseDecision:
    """Phase B: the assembled candidate (`other`) against the live release (`base`) on the same tasks and trials.

    `pair` is the split, with the columns of `judge_capabilities` and outcomes 0 or 1; `further` are the pairs of the
    tasks that were drawn for own families. They count for these and for each family; not for own families that are all
    there are, of which only some have further tasks (`even_shares`). `own[capability]` are the families of each
    capability that passed phase A (empty: all tasks); without any only the difference over the split can be better.
    `trials` is k of pass^k. `settled` are the pairs of further episodes of families whose fall was unclear: they decide
    on the falls of these families, stand for them where all other families together, or pass^k, seem to fall and may
    not (pass^k only where each of them has a task with k of these trials), and change nothing else. `left` are
    families that fell with a first router, and why: the one that is judged leaves them to what answers them today. Then
    only the own families can be better, which that choice did not touch."""
    table = PairedTasks.of("pair", pair)
    drawn: set[str] = set() if further is None else set(further["family"])
    with_further = PairedTasks.of("further", pd.concat([pair, further])) if drawn else table
    settling = None if settled is None or settled.empty else PairedTasks.of("settled", settled)
    own_families = {name: set(families) or table.names for name, families in own.items()}
    of_passed = {family for families in own_families.values() for family in families}

    def own_tasks(families: Collection[str]) -> PairedTasks:
        return (with_further if even_shares(families, table.names, drawn) else table).of_families(families)

    overall, of_own = table.difference(), own_tasks(of_passed).difference()
    mde = table.mde(look.alpha) if overall else None
    gained = overall is not None and overall.points > 0
    whole = overall is not None and overall.p <= look.alpha
    kept = of_own is not None and of_own.points > 0 and of_own.p <= look.alpha
    better = gained and (kept or (whole and not left))
    whole_text = f"{_figures(overall)}: {_significant(gained and whole, look)}" if overall else "nothing was compared"
    reasons = [f"As a whole: {whole_text}."]
    capabilities = {}
    for name, families in own_families.items():
        difference = own_tasks(families).difference()
        if difference is not None:
            capabilities[name] = difference
            reasons.append(f"Own tasks of {name}, routed: {_figures(difference)}.")
    if better and not whole and of_own is not None:
        reasons.append(f"The gain on its own tasks is still there after routing: {_figures(of_own)}.")
    level = rules.fall_confidence
    whole_split, elsewhere, steady = _Watched(OVERALL), _Watched(ELSEWHERE), _Watched(f"pass^{trials}")
    watched = {whole_split: table.difference(level)}
    if table.names - of_passed and of_passed:
        watched[elsewhere] = table.of_families(table.names - of_passed).difference(level)
    by_family = {str(f): with_further.of_families({f}).difference(level) for f in sorted(with_further.names)}
    watched |= {_Watched(f, family=True): change for f, change in by_family.items()}
    if trials > 1:
        watched[steady] = table.pass_k(trials, level)
    falls = {at: judge_fall(at.name, change, rules) for at, change in watched.items()}
    if settling is not None:
        for name in settling.names:
            falls[_Watched(name, family=True)] = judge_settled(
                name, by_family.get(name), settling.of_families({name}).difference(level), rules
            )
        instead = PairedTasks.of("settled", pd.concat([pair[~pair["family"].isin(settling.names)], settled]))
        others = instead.of_families(table.names - of_passed)
        changes = {elsewhere: others.difference(level)}
        if all(instead.of_families({name}).pass_k(trials, level) is not None for name in settling.names):
            changes[steady] = instead.pass_k(trials, level)  # else it would be that of the families that did not fall
        for at, change in changes.items():
            if at in falls and falls[at].kind is FallKind.UNCLEAR:
                falls[at] = judge_settled(at.name, watched[at], change, rules)
    for at in (at for at in watched if at.family or at == whole_split):
        played = settling if settling is not None and at.family and at.name in settling.names else with_further
        played = played.of_families({at.name}) if at.family else table
        lost = judge_lost(at.name, played.lost(), len(played.families), rules)
        if lost.blocks and not falls[at].blocks:
            falls[at] = lost
    for why in (left or {}).values():
        reasons.append(f"{LEFT} {why} It is left to what answers it today.")
    # Those that decide stand last, where the report looks for them.
    reasons += [fall.reason for fall in sorted(falls.values(), key=lambda fall: fall.blocks) if fall.reason]
    kinds = {fall.kind for fall in falls.values()}
    if FallKind.REGRESSION in kinds:
        verdict = GateVerdict.REGRESSION
    elif overall is None or mde is None:
        verdict = GateVerdict.UNDERPOWERED
        reasons.append(NOTHING_COMPARED)
    elif not better:
        verdict, why = _not_better("The release", overall, mde, (look.alpha, 1, rules.worthwhile))
        reasons.append(why)
    elif any(fall.blocks for fall in falls.values()):
        verdict = GateVerdict.UNDERPOWERED
    else:
        verdict = GateVerdict.PROMOTED
        reasons.append(f"Nothing fell by more than {rules.margin:g} points or one task, in no family nor in pass^k.")
    return ReleaseDecision(
        verdict=verdict,
        reasons=tuple(reasons),
        difference=overall,
        own=of_own,
        capabilities=capabilities,
        elsewhere=table.of_families(table.names - of_passed).difference() if elsewhere in watched else None,
        families={f: d for f in by_family if (d := with_further.of_families({f}).difference()) is not None},
        falls={at.name: fall for at, fall in falls.items() if at.family},
        wholes={at.name: fall for at, fall in falls.items() if not at.family},
        kept=kept,
        pass_k=table.pass_k(trials),
        trials=trials,
        mde=mde,
        alpha=look.alpha,
        look=look.number,
    )


def even_shares(own: Collection[str], split: Collection[str], drawn: Collection[str]) -> bool:
    """Whether own families may be judged with further tasks, which there are of the families `drawn`. Not where they
    are all families of the split and only some have further tasks: that would judge the whole, with those that were
    trained for weighing more."""
    return not set(split) <= set(own) or set(own) <= set(drawn)


def unclear_families(pair: pd.DataFrame, rules: GateRules) -> list[str]:
    """Families of the pair in which the candidate seems to fall and may not, the largest fall first."""
    table, level = PairedTasks.of("pair", pair), rules.fall_confidence
    falls = []
    for name in sorted(table.names):
        change = table.of_families({name}).difference(level)
        if change is not None and judge_fall(name, change, rules).kind is FallKind.UNCLEAR:
            falls.append((change.points, str(name)))
    return [name for _, name in sorted(falls)]


def _unmeasured(mine: PairedTasks, families: Collection[str]) -> str:
    """Why a capability has no figures."""
    of = f" of its families ({', '.join(sorted(families))})" if families else ""
    if mine.names:
        return f"Both sides finished no validation task{of} in common, so no gain could have been found."
    return f"Validation has no task{of}, so no gain could have been found."


def _figures(d: PairedDifference) -> str:
    return (
        f"{d.points:+.1f} points over {d.tasks} tasks, {d.changed} of them changed "
        f"(95 % interval {d.low:+.1f} to {d.high:+.1f}), {p_phrase(d.p, 4)}"
        + (f", {d.left_out} more left out because a side lost them to errors" if d.left_out else "")
    )


def _significant(better: bool, look: Look) -> str:
    return f"{'significant' if better else 'not significant'} at {look.alpha:.4g}, what look {look.number} may spend"


def _not_better(
    what: str, difference: PairedDifference, mde: float, needs: tuple[float, int, float]
) -> tuple[GateVerdict, str]:
    """What is said of it, by the look's level, how many were tried at it, and the gain that is worth having."""
    level, tried, worthwhile = needs
    if difference.points <= 0:
        return GateVerdict.NOT_BETTER, f"{what} did not gain."
    if difference.floor_p > level / tried:
        # Holm grants more to the last of several that pass.
        unless = "" if difference.floor_p > level else " unless others had"
        return GateVerdict.UNDERPOWERED, (
            f"{difference.tasks} tasks cannot give a p-value below {difference.floor_p:.2g}, so no gain could have "
            f"passed{unless}; evaluate on more tasks."
        )
    if mde > worthwhile:
        return GateVerdict.UNDERPOWERED, (
            f"Only a gain of {mde:.1f} points or more would have been found with 80 % power, and {worthwhile:g} "
            "would be worth having; evaluate on more tasks."
        )
    return GateVerdict.NOT_BETTER, f"A gain of {mde:.1f} points would have been found with 80 % power, and was not."
