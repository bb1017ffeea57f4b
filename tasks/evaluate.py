"""Stage 7, `trace-agent stage evaluate` and `trace-agent stage test`: base, live release, candidate and no-op on a
split, with equal seeds (method, section 7). The validation split feeds the gate; the test split reports and decides
nothing: its tasks and seeds are the same in every round, and the looks at it are counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from db import EvaluationRow, ReleaseRow, row_id
from environments.contract import TargetTask
from environments.picking import spread
from errors import EpisodesLost, EpisodesSpent
from models.scripted import NoopPolicy
from tasks.gating.judging import decision_on, look_at, own_families, pairs_of, rules_of
from tasks.measuring.falls import FallKind
from tasks.measuring.gate_plan import AGAIN, noop_tasks
from tasks.measuring.gate_rules import ELSEWHERE, unclear_families
from tasks.measuring.lineup import BARE_BASE, Lineup, Trials, lineup_of, play_lineup
from tasks.measuring.statistics import success_interval
from tasks.releases.lifecycle import add_evidence, release_numbered
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, EvaluateResult, GateResult, RouteResult, SuccessRate, TestResult
from tasks.round.rollouts import episodes_for, outcomes
from tasks.round.stage import stage
from tasks.routing.candidate import amend

logger = logging.getLogger("trace")


class Sides(NamedTuple):
    """What is compared: what answers today, and what may answer after it."""

    live: Lineup
    routed: Lineup


class Pair(NamedTuple):
    """Trajectory ids of both sides."""

    live: list[str]
    routed: list[str]


class Measured(TypedDict):
    """Trajectory ids and success on a split by what played it: fields of the results of both stages. Only the no-op may
    be without a rate."""

    base_ids: list[str]
    live_ids: list[str]
    routed_ids: list[str]
    noop_ids: list[str]
    base: SuccessRate | None
    live: SuccessRate | None
    routed: SuccessRate | None
    noop: SuccessRate | None


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
            try:
                return _compared(context, amended, left)
            except EpisodesSpent as problem:
                logger.warning("the candidate is judged as it was assembled first: %s", problem)
    return found


def _compared(context: Context, candidate: ReleaseRow, left: Mapping[str, str] | None = None) -> EvaluateResult:
    """Base, live release and candidate on the split and its further tasks, and what settles whether a family fell.
    `left` says what an amended candidate leaves to what answers it today."""
    sides = Sides(live=lineup_of(context, context.incumbent), routed=lineup_of(context, candidate))
    trials = context.settings.evaluation.validation_trials
    challenged = context.result(ChallengeResult)

    drawn = Trials(context.drawing.further(challenged.further), trials, context.seed)
    further = _play_both(context, sides, [drawn], "further validation tasks")
    measured = _measure(context, "validation", sides, trials, context.seed)
    live, routed = [*measured["live_ids"], *further.live], [*measured["routed_ids"], *further.routed]
    unclear = unclear_families(pairs_of(context, live, routed), rules_of(context))
    settled = Pair([], [])
    try:
        if settling := _settling(context, challenged.further, unclear):
            settled = _play_both(context, sides, settling, "what settles a fall")
    except EpisodesSpent as problem:
        logger.warning("it stays unclear whether %s fell: %s", " and ".join(unclear), problem)
    return EvaluateResult(
        **measured,
        further_live_ids=further.live,
        further_routed_ids=further.routed,
        settled_live_ids=settled.live,
        settled_routed_ids=settled.routed,
        candidate=candidate.id if left else "",
        left=dict(left or {}),
    )


def _play_both(context: Context, sides: Sides, owed: Sequence[Trials], what: str) -> Pair:
    """Have the live release play all of it, then the candidate."""

    def played(lineup: Lineup, name: str) -> list[str]:
        return [i for part in owed for i in play_lineup(context, lineup, part, f"{what} ({name})").ids]

    return Pair(live=played(sides.live, "live"), routed=played(sides.routed, "routed"))


def _to_leave(context: Context, found: EvaluateResult) -> dict[str, str]:
    """Families that keep a candidate from being promoted which is better on the own families of what passed, with the
    reason for each: none of them is such an own family. Where none of them falls and all together do, those that lost
    what is within their resolution."""
    decision = decision_on(context, found)
    own = {family for families in own_families(context).values() for family in families}
    fell = {f: decision.falls[f].reason for f in decision.families if decision.falls[f].blocks}
    together = decision.wholes.get(ELSEWHERE)
    if not fell and together is not None and together.blocks:
        small = {f: d for f, d in decision.families.items() if decision.falls[f].kind is FallKind.WITHIN}
        fell = {f: f"{f}: {d.points:+.1f} points, and {together.reason}" for f, d in small.items() if f not in own}
    if decision.promoted or not decision.kept or not own or own & fell.keys():
        return {}
    return fell


def _settling(context: Context, further: Mapping[str, int], unclear: Sequence[str]) -> list[Trials]:
    """What neither side has played of the families that seem to fall and may not, by the gate's rules: further tasks
    where the target has so many left to draw, else further trials of those that were played. Nothing where more
    families seem to fall than the rules allow."""
    rules, trials = rules_of(context), context.settings.evaluation.validation_trials
    if not unclear or not rules.settling or len(unclear) > rules.settled:
        return []
    before = [*context.tasks("validation"), *context.drawing.further(further)]
    played = {task.id for task in before}
    drawn = context.drawing.further({family: further.get(family, 0) + rules.settling for family in unclear})
    new = [task for task in drawn if task.id not in played]
    # A few say less than what they would stand for: of one task that is lost the fall would be "at most one task".
    counts = Counter(task.family for task in new)
    new = [task for task in new if counts[task.family] >= rules.settling]
    owed = [Trials(new, trials, context.seed)] if new else []
    episodes = AGAIN * rules.settling * trials
    for family in sorted(set(unclear) - {task.family for task in new}):
        mine = [task for task in before if task.family == family]
        # Fewer than the first had would leave a task without pass^k, which would then be that of the other families.
        owed.append(Trials(mine, max(trials, episodes // len(mine)), context.seed, first=trials))
    return owed


@stage("test", title="evaluate on test")
def test(context: Context) -> TestResult:
    """The test split: what was live before the round, and what is live after it."""
    before, number = context.incumbent, context.result(GateResult).release
    after = release_numbered(context.store, context.round.target, number) if number else before
    sides = Sides(live=lineup_of(context, before), routed=lineup_of(context, after))
    look = look_at(context, "test")
    measured = _measure(context, "test", sides, context.settings.evaluation.trials, context.settings.seed)
    if after is not None and after.data_hash == context.round.data_hash:  # of its own data it says what was measured
        # The episodes took long: whoever rolled the release back meanwhile must not find it live again.
        rate = measured["routed"]
        assert rate is not None, "a side that lost every episode ends the stage"
        add_evidence(context.store, after.id, {"test": {"routed": rate.model_dump()}})
    return TestResult(**measured, release=after.number if after else 0, looks=look.number)


test.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _measure(context: Context, split: str, sides: Sides, trials: int, seed: int) -> Measured:
    """Play what is owed of a split, by all sides before an evaluation of any is stored."""
    tasks = context.tasks(split)
    owed = Trials(tasks, trials, seed)

    def played(lineup: Lineup, name: str) -> list[str]:
        return play_lineup(context, lineup, owed, f"{split} ({name})").ids

    base, live, routed = played(BARE_BASE, "base"), played(sides.live, "live"), played(sides.routed, "routed")
    nothing = spread(tasks, noop_tasks(len(tasks))) if split == "validation" else tasks
    noop, sizes = _noop(context, nothing, split, seed), (len(tasks), trials)
    return Measured(
        base_ids=base,
        live_ids=live,
        routed_ids=routed,
        noop_ids=noop,
        base=_store_evaluation(context, split, "base", base, sizes),
        live=_store_evaluation(context, split, "live", live, sizes),
        routed=_store_evaluation(context, split, "routed", routed, sizes),
        noop=_store_evaluation(context, split, "noop", noop, (len(nothing), 1)),
    )


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
    by_task = frame.groupby(["family", "task"])["success"].mean()  # a task weighs the same, whatever errors took of it
    rate = SuccessRate(success=interval.rate, low=interval.low, high=interval.high, n=interval.n, tasks=interval.tasks)
    context.store.put(
        [
            EvaluationRow(
                id=row_id(context.round.id, split, subject),
                round_id=context.round.id,
                split=split,
                subject=subject,
                n_tasks=sizes[0],
                trials=sizes[1],
                **rate.model_dump(include={"success", "low", "high"}),
                detail=by_task.groupby("family").mean().to_dict(),
            )
        ],
        replace=True,
    )
    return rate
