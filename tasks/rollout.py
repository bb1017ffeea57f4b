"""Stage 1, `trace-agent stage rollout`: what is live plays every diagnosis task, `rollout.trials` times each, routed as
in production (method, section 1); so mining sees what is *still* lacking. The only stage that plays diagnosis episodes:
what later stages read is what was stored here."""

from __future__ import annotations

import logging

import pandas as pd

from errors import EnvironmentFault
from tasks.measuring.lineup import TRIED, Trials, lineup_of, play_alone, play_lineup
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
    """Play what is not stored yet, or import the conversations of users. What plays is the live release, or the round's
    adapter `by` that name, which trainings begin from; of what both have played the result is then what a router would
    have answered (`tasks/routing/lacking.py`).

    Raises `EnvironmentFault` when no episode has a reward, `ConfigurationError` when turns are too short to have one,
    or where what the round has to beat stands on another base.
    """
    ids = _played(context, by)
    frame = outcomes(context.store, ids)
    if frame.empty:
        first = context.store.trajectory_frame(None, id=ids[:1])["error"].iloc[0]
        raise EnvironmentFault(f"all {len(ids)} diagnosis episodes were lost to errors; the first: {first}")
    if by:
        ids, frame = _as_routed(context, by, ids, frame)
    return RolloutResult(
        release=context.parent.number if context.parent else 0,
        trajectories=ids,
        lost=len(ids) - len(frame),
        success=float(frame["success"].mean()),
    )


def _played(context: Context, by: str) -> list[str]:
    """Ids of the diagnosis episodes, which are stored then."""
    if isinstance(context.target, TrafficTarget):  # users have played already
        return import_conversations(context.store, context.round, context.target)
    check_turn_length(context)
    # A new lineage: what it has to beat plays only after all trainings, in `challenge`, so it is checked before them.
    if context.parent is None:
        lineup_of(context, context.incumbent)
    tasks, trials = context.tasks("diagnosis"), context.settings.rollout.trials
    if by:
        adapter = own_adapter(context.stored, by)
        return play_alone(context, by, adapter, Trials(tasks, trials, context.seed, TRIED), "diagnosis")
    lineup = lineup_of(context, context.parent)
    return play_lineup(context, lineup, Trials(tasks, trials, context.seed, "diagnosis"), "diagnosis").ids


def _as_routed(context: Context, by: str, ids: list[str], frame: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """Ids and outcomes of what is mined: of each task the episodes of the live release or those of the adapter, which
    are `ids` with the outcomes `frame`, and those of `ids` that were lost."""
    lost = sorted(set(ids) - set(frame["id"]))
    mined = [*best_played(context, context.result(RolloutResult).trajectories, ids), *lost]
    frame = outcomes(context.store, mined)
    logger.info(
        "of %d diagnosis tasks, what is live would answer %d and %s the others; what both lack is mined",
        frame["task"].nunique(),
        frame[~frame["id"].isin(ids)]["task"].nunique(),
        by,
    )
    return mined, frame
