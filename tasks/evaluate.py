"""Stage 7, `trace-agent stage evaluate` and `trace-agent stage test`: base, live release, candidate and no-op on a
split, with equal seeds (method, section 7). The validation split feeds the gate; the test split reports and decides
nothing: its tasks and seeds are the same in every round, and the looks at it are counted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from db import EvaluationRow, ReleaseRow, row_id
from environments.contract import TargetTask
from environments.picking import spread
from errors import EpisodesLost, EpisodesSpent
from models.scripted import NoopPolicy
from tasks.gating.judging import decision_on, look_at, own_families, pairs_of, rules_of
from tasks.measuring.falls import FallKind
from tasks.measuring.gate_plan import AGAIN, noop_tasks
from tasks.measuring.gate_rules import ELSEWHERE, unclear_families
from tasks.measuring.lineup import BARE_BASE, Lineup, lineup_of, play_lineup
from tasks.measuring.statistics import success_interval
from tasks.releases.lifecycle import add_evidence, release_numbered
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, EvaluateResult, GateResult, RouteResult, SuccessRate, TestResult
from tasks.round.rollouts import episodes_for, outcomes
from tasks.round.stage import stage
from tasks.routing.candidate import amend

logger = logging.getLogger("trace")


class Trials(NamedTuple):
    """`each` trials of every one of some tasks, from trial `first` on."""

    tasks: Sequence[TargetTask]
    each: int
    first: int = 0


@stage("evaluate", title="evaluate on validation")
def evaluate(context: Context) -> EvaluateResult:
    """The validation split, with the candidate that was assembled. Where it gains and some families fall, its router is
    fitted again so that these are left to what answers them today, and the candidate is evaluated so."""
    routed = context.result(RouteResult)
    if routed.skipped:
        return EvaluateResult(skipped=routed.skipped)
    candidate = context.store.row(ReleaseRow, id=routed.candidate)
    assert candidate is not None
    found = _compared(context, candidate)
    if left := _to_leave(context, found):
        amended = amend(context, candidate, left)
        if amended is not None:
            logger.info("%s fell: tasks like theirs are left to what answers them today", " and ".join(left))
            return _compared(context, amended).model_copy(update={"candidate": amended.id, "left": left})
    return found


def _compared(context: Context, candidate: ReleaseRow) -> EvaluateResult:
    """Base, live release and candidate on the split and its further tasks, and what settles whether a family fell."""
    sides = {"live": lineup_of(context, context.incumbent), "routed": lineup_of(context, candidate)}
    trials = context.settings.evaluation.validation_trials
    challenged = context.result(ChallengeResult)

    def both(owed: Sequence[Trials], prefix: str, what: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {f"{prefix}_{name}_ids": [] for name in sides}
        for name, lineup in sides.items():
            for part in owed:
                given = lineup, part.tasks, part.each, context.seed, f"{what} ({name})", "evaluation", part.first
                found[f"{prefix}_{name}_ids"] += play_lineup(context, *given).ids
        return found

    further = both([Trials(context.drawing.further(challenged.further), trials)], "further", "further validation tasks")
    measured = _measure(context, "validation", sides, trials, context.seed)
    found = EvaluateResult(**measured, **further)
    live, routed = [*found.live_ids, *found.further_live_ids], [*found.routed_ids, *found.further_routed_ids]
    unclear = unclear_families(pairs_of(context, live, routed), rules_of(context))
    try:
        if settling := _settling(context, challenged.further, unclear):
            return found.model_copy(update=both(settling, "settled", "what settles a fall"))
    except EpisodesSpent as problem:
        logger.warning("whether %s fell stays unclear: %s", " and ".join(unclear), problem)
    return found


def _to_leave(context: Context, found: EvaluateResult) -> dict[str, str]:
    """Families that keep a candidate from being promoted which is better on the own families of what passed, with the
    reason for each: none of them is such an own family. Where none of them falls and all together do, those that lost
    what is within their resolution."""
    decision = decision_on(context, found)
    own = {family for families in own_families(context).values() for family in families}
    fell = {f: decision.fallen[f] for f in decision.families if f in decision.fallen}
    if not fell and ELSEWHERE in decision.fallen:
        small = {f: d for f, d in decision.families.items() if decision.falls[f] is FallKind.WITHIN and f not in own}
        fell = {f: f"{f}: {d.points:+.1f} points, and {decision.fallen[ELSEWHERE]}" for f, d in small.items()}
    if decision.promoted or not decision.kept or not own or own & fell.keys():
        return {}
    return fell


def _settling(context: Context, further: Mapping[str, int], unclear: Sequence[str]) -> list[Trials]:
    """What neither side has played of the families that seem to fall and may not, by the gate's rules: further tasks
    where the target draws, else further trials of the split's own. Nothing where more families seem to fall than the
    rules allow."""
    rules, trials = rules_of(context), context.settings.evaluation.validation_trials
    if not unclear or not rules.settling or len(unclear) > rules.settled:
        return []
    if not context.drawing.draws("validation"):
        by_family = {f: [t for t in context.tasks("validation") if t.family == f] for f in sorted(unclear)}
        episodes = AGAIN * rules.settling * trials
        # Fewer than the first had would leave a task without pass^k, which would then be that of the other families.
        return [Trials(mine, max(trials, episodes // len(mine)), trials) for mine in by_family.values()]
    drawn = context.drawing.further({family: further.get(family, 0) + rules.settling for family in unclear})
    played = {task.id for task in context.drawing.further(further)} if further else set()
    return [Trials([task for task in drawn if task.id not in played], trials)]


@stage("test", title="evaluate on test")
def test(context: Context) -> TestResult:
    """The test split: what was live before the round, and what is live after it."""
    before, number = context.incumbent, context.result(GateResult).release
    after = release_numbered(context.store, context.round.target, number) if number else before
    sides = {"live": lineup_of(context, before), "routed": lineup_of(context, after)}
    look = look_at(context, "test")
    measured = _measure(context, "test", sides, context.settings.evaluation.trials, context.settings.seed)
    if after is not None and after.data_hash == context.round.data_hash:  # of its own data it says what was measured
        # The episodes took long: whoever rolled the release back meanwhile must not find it live again.
        add_evidence(context.store, after.id, {"test": {"routed": measured["routed"].model_dump()}})
    return TestResult(**measured, release=after.number if after else 0, looks=look.number)


test.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _measure(context: Context, split: str, sides: dict[str, Lineup], trials: int, seed: int) -> dict[str, Any]:
    """Play what is owed of a split and store the evaluations; the fields of the stage's result."""
    tasks = context.tasks(split)
    ids = {
        name: play_lineup(context, lineup, tasks, trials, seed, f"{split} ({name})", "evaluation").ids
        for name, lineup in {"base": BARE_BASE, **sides}.items()
    }
    nothing = spread(tasks, noop_tasks(len(tasks))) if split == "validation" else tasks
    ids["noop"] = _noop(context, nothing, split, seed)
    sizes = {name: (len(tasks), trials) for name in ids} | {"noop": (len(nothing), 1)}
    rates = {name: _store_evaluation(context, split, name, ids[name], sizes[name]) for name in ids}
    return {**{f"{name}_ids": found for name, found in ids.items()}, **rates}


def _noop(context: Context, tasks: Sequence[TargetTask], split: str, seed: int) -> list[str]:
    """What doing nothing scores: one episode a task."""
    engine = context.engine_of(NoopPolicy())
    return engine.play(context.ground("evaluation"), episodes_for(tasks, 1, seed), f"no-op on {split}")


def _store_evaluation(
    context: Context, split: str, subject: str, ids: Sequence[str], sizes: tuple[int, int]
) -> SuccessRate | None:
    """Keep one side's success with its interval; `sizes` are tasks and trials. Where every episode of it was lost,
    `EpisodesLost`, but None for the no-op, which decides nothing: doing nothing may be what a scoring cannot take."""
    frame = outcomes(context.store, ids)
    if frame.empty:
        lost = f"all {len(ids)} episodes of {subject} on the {split} split were lost to errors, so it has no rate"
        if subject == "noop":
            logger.warning("%s (docs/2-database.md, question 3)", lost)
            return None
        raise EpisodesLost(
            f"{lost}; mend what they were lost to (docs/2-database.md, question 3), then run the same command"
        )
    interval = success_interval(frame)
    rate = SuccessRate(success=interval.rate, low=interval.low, high=interval.high)
    context.store.put(
        [
            EvaluationRow(
                id=row_id(context.round.id, split, subject),
                round_id=context.round.id,
                split=split,
                subject=subject,
                n_tasks=sizes[0],
                trials=sizes[1],
                **rate.model_dump(),
                detail=frame.groupby("family")["success"].mean().to_dict(),
            )
        ],
        replace=True,
    )
    return rate
