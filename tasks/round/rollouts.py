"""A round's rollouts: which episodes it plays, where, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from db import Store, TrajectoryRow
from environments.contract import TargetTask
from errors import BudgetExceeded
from models.episodes import Episode, Trajectory
from models.policy import MessagePolicy, TokenPolicy
from tasks.round.context import Context
from tasks.round.engine import Engine, Origin, Playground, PlayOptions, row_of

# Of a round's episodes only the cap on spending ends the playing: the next call would meet it again.
WITHIN_BUDGET = PlayOptions(fatal=(BudgetExceeded.boundary,))


def episodes_for(tasks: Sequence[TargetTask], trials: int, seed: int, adapter: str | None = None) -> list[Episode]:
    """One episode per task and trial; `key` is filled in when it is played."""
    return [Episode("", task, seed, trial, adapter) for task in tasks for trial in range(trials)]


def engine_of(context: Context, policy: TokenPolicy | MessagePolicy | None = None) -> Engine:
    """What plays and stores in the round; `policy` None is the round's own."""
    acting = context.policy if policy is None else policy
    renderer = context.base.renderer if isinstance(acting, TokenPolicy) else None
    rows = 2 * context.settings.rollout.rows
    return Engine(context.store, origin_of(context), acting, renderer, rows, WITHIN_BUDGET)


def origin_of(context: Context) -> Origin:
    """Where the round's trajectories come from."""
    return Origin(context.round.target, context.round.data_hash, context.round.id)


def play_owed(
    context: Context,
    ground: Playground,
    episodes: Sequence[Episode],
    policy: TokenPolicy | MessagePolicy | None = None,
    what: str = "",
) -> list[str]:
    """Play the episodes that are not stored, store them, and return all ids in the order of `episodes`.

    Raises `BudgetExceeded` at the first episode whose simulated user may cost no more: what was played is kept."""
    run = engine_of(context, policy).play(ground, episodes, what)
    context.environment.seconds += run.environment_seconds
    context.model.seconds += run.model_seconds
    if run.stopped:
        raise BudgetExceeded(run.stopped)
    return run.ids


def trajectory_row(
    context: Context, ground: Playground, trajectory: Trajectory, row_id: str | None = None
) -> TrajectoryRow:
    """What the store keeps of an episode of the round that something else has played, such as training."""
    return row_of(trajectory, ground, origin_of(context), row_id)


def outcomes(store: Store, ids: Sequence[str]) -> pd.DataFrame:
    """Frame [id, task, family, trial, success, reward] of stored trajectories without errors, in the order of `ids`."""
    frame = store.trajectory_frame(None, id=list(ids))
    frame = frame[frame["error_boundary"].isna()]
    frame = frame.set_index("id").reindex([i for i in ids if i in set(frame["id"])]).reset_index()
    frame["success"] = frame["success"].astype(bool)
    return frame.rename(columns={"task_id": "task"})


def base_ground(context: Context, purpose: str) -> Playground:
    """The target's own environment at the evaluation temperature."""
    rollout = context.settings.rollout
    return Playground(
        context.target.environment, context.round.target, purpose, rollout.temperature, rollout.max_tokens
    )
