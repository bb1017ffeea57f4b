"""Stage 1, `trace-agent stage rollout`: the base plays every diagnosis task, `rollout.trials` times each (method,
section 1). The only stage that plays diagnosis episodes: what later stages read is what was stored here."""

from __future__ import annotations

from errors import EnvironmentFault
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.round.rollouts import episodes_for, outcomes
from tasks.round.stage import stage
from tasks.round.traffic import TrafficTarget, import_conversations


@stage("rollout", title="rollout of the diagnosis split")
def rollout(context: Context) -> RolloutResult:
    """Play what is not stored yet; conversations of users are imported instead.

    Raises `EnvironmentFault` when no episode has a reward.
    """
    if isinstance(context.target, TrafficTarget):  # played already, by users
        ids = import_conversations(context.store, context.round, context.target)
    else:
        episodes = episodes_for(context.tasks("diagnosis"), context.settings.rollout.trials, context.settings.seed)
        ids = context.engine.play(context.ground("diagnosis"), episodes, "rollout of diagnosis")
    frame = outcomes(context.store, ids)
    if frame.empty:
        first = context.store.trajectory_frame(None, id=ids[:1])["error"].iloc[0]
        raise EnvironmentFault(f"all {len(ids)} diagnosis episodes were lost to errors; the first: {first}")
    return RolloutResult(trajectories=ids, lost=len(ids) - len(frame), success=float(frame["success"].mean()))
