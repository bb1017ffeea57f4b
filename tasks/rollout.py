"""Stage 1, `trace-agent stage rollout`: what is live plays every diagnosis task, `rollout.trials` times each, routed as
in production (method, section 1); so mining sees what is *still* lacking. The only stage that plays diagnosis episodes:
what later stages read is what was stored here."""

from __future__ import annotations

import logging

from errors import EnvironmentFault
from tasks.measuring.lineup import TRIED, lineup_of, play_alone, play_lineup
from tasks.operations.turn_length import check_turn_length
from tasks.round.adapters import own_adapter
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.round.traffic import TrafficTarget, import_conversations
from tasks.routing.lacking import best_played

logger = logging.getLogger("trace")


@stage("rollout", title="rollout of the diagnosis split")
def rollout(context: Context, by: str = "") -> RolloutResult:
    """Play what is not stored yet; conversations of users are imported instead. What plays is live, or the round's
    adapter `by` name, which trainings go on from; of what both have played, what a router would have answered is the
    result (`tasks/routing/lacking.py`).

    Raises `EnvironmentFault` when no episode has a reward, `ConfigurationError` when turns are too short to have one,
    or where what the round has to beat stands on another base.
    """
    if isinstance(context.target, TrafficTarget):  # played already, by users
        ids = import_conversations(context.store, context.round, context.target)
    else:
        check_turn_length(context)
        # A new lineage: what answers all the same plays first in `challenge`, which is a training later.
        if context.parent is None:
            lineup_of(context, context.incumbent)
        tasks, trials = context.tasks("diagnosis"), context.settings.rollout.trials
        if by:
            mine = own_adapter(context.stored, by)
            ids = play_alone(context, by, mine, tasks, trials, context.seed, "diagnosis", TRIED)
        else:
            lineup = lineup_of(context, context.parent)
            ids = play_lineup(context, lineup, tasks, trials, context.seed, "diagnosis", "diagnosis").ids
    frame = outcomes(context.store, ids)
    if frame.empty:
        first = context.store.trajectory_frame(None, id=ids[:1])["error"].iloc[0]
        raise EnvironmentFault(f"all {len(ids)} diagnosis episodes were lost to errors; the first: {first}")
    mined = ids
    if by:
        lost = sorted(set(ids) - set(frame["id"]))
        mined = [*best_played(context, context.result(RolloutResult).trajectories, ids), *lost]
        frame = outcomes(context.store, mined)
        logger.info(
            "of %d diagnosis tasks what is live would answer %d, %s the others: mined is what both lack",
            frame["task"].nunique(),
            frame[~frame["id"].isin(ids)]["task"].nunique(),
            by,
        )
    return RolloutResult(
        release=context.parent.number if context.parent else 0,
        trajectories=mined,
        lost=len(mined) - len(frame),
        success=float(frame["success"].mean()),
    )
