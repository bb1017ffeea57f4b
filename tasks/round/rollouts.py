"""Playing what is owed: episodes whose trajectories are not stored yet, stored as they end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from db import CheckRow, StepRow, Store, TrajectoryRow
from environments.contract import TargetTask
from errors import BudgetExceeded
from models.episodes import Episode, Player, Trajectory, trajectory_id
from models.policy import MessagePolicy, PolicyIdentity, Sampling, TokenPolicy
from tasks.round.context import Context
from tasks.round.progress import Meter

# Trajectories written in one transaction: what a killed process has to play again is at most this and what is open.
FLUSH = 16


@dataclass(frozen=True)
class Playground:
    """Where episodes are played and how they are stored. `environment` names target or synthesized environment."""

    make: Any
    environment: str
    purpose: str
    temperature: float
    max_tokens: int
    adapter_id: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class Origin:
    """Which target's data an episode was played on, and in which round (None: outside of one)."""

    target: str
    data_hash: str
    round_id: str | None = None


def episodes_for(tasks: Sequence[TargetTask], trials: int, seed: int, adapter: str | None = None) -> list[Episode]:
    """One episode per task and trial; `key` is filled in by `play_owed`."""
    return [Episode("", task, seed, trial, adapter) for task in tasks for trial in range(trials)]


def ids_of(context: Context, ground: Playground, episodes: Iterable[Episode], identity: PolicyIdentity) -> list[str]:
    """Trajectory ids of episodes under a policy: the same for the same work, whoever does it and when."""
    where = f"{ground.environment}|{ground.temperature}|{ground.max_tokens}"
    return [trajectory_id(context.round.data_hash, where, e.task, e.seed, e.trial, identity) for e in episodes]


def play_owed(
    context: Context,
    ground: Playground,
    episodes: Sequence[Episode],
    policy: TokenPolicy | MessagePolicy | None = None,
    what: str = "",
) -> list[str]:
    """Play the episodes that are not stored, store them, and return all ids in the order of `episodes`.

    Raises `BudgetExceeded` at the first episode whose simulated user may cost no more: what was played is kept."""
    base = context.base if policy is None or isinstance(policy, TokenPolicy) else None
    acting = policy if policy is not None else context.policy
    identities = {a: acting.identity(a) for a in {e.adapter for e in episodes}}
    ids = [ids_of(context, ground, [e], identities[e.adapter])[0] for e in episodes]
    stored = context.store.stored_ids(ids)
    owed = {i: replace(e, key=i) for i, e in zip(ids, episodes, strict=True) if i not in stored}
    if not owed:
        return ids
    player = Player(
        ground.make,
        acting,
        base.renderer if base else None,
        Sampling(ground.temperature, ground.max_tokens),
        2 * context.settings.rollout.rows,
    )
    waiting: list[TrajectoryRow] = []
    with Meter(what or ground.purpose, len(owed), "episodes", at_once=player.window) as meter:
        player.stepped = lambda: meter.beat(f"{player.steps} steps")
        for trajectory in player.play(owed.values()):
            waiting.append(trajectory_row(context, ground, trajectory))
            over = trajectory.boundary == BudgetExceeded.boundary
            if len(waiting) >= FLUSH or over:
                context.store.add_trajectories(waiting)
                waiting.clear()
            if over:
                raise BudgetExceeded(trajectory.error)
            meter.advance(f"{player.steps} steps")
    context.store.add_trajectories(waiting)
    context.environment.seconds += player.environment_seconds
    context.model.seconds += player.policy_seconds
    return ids


def trajectory_row(
    context: Context, ground: Playground, trajectory: Trajectory, row_id: str | None = None
) -> TrajectoryRow:
    """What the store keeps of an episode of a round."""
    at = Origin(context.round.target, context.round.data_hash, context.round.id)
    return row_of(trajectory, ground, at, row_id)


def row_of(trajectory: Trajectory, ground: Playground, at: Origin, row_id: str | None = None) -> TrajectoryRow:
    """What the store keeps of an episode."""
    episode, talk, score = trajectory.episode, trajectory.conversation, trajectory.score
    return TrajectoryRow(
        id=row_id or episode.key,
        round_id=at.round_id,
        purpose=ground.purpose,
        target=at.target,
        data_hash=at.data_hash,
        environment=ground.environment,
        task_id=episode.task.id,
        family=episode.task.family,
        split=episode.task.split,
        seed=episode.seed,
        trial=episode.trial,
        policy_id=trajectory.policy.id,
        base=trajectory.policy.base,
        termination=str(trajectory.termination),
        reward=score.reward if score else None,
        success=score.success if score else None,
        adapter_id=ground.adapter_id if episode.adapter else None,
        group_id=ground.group,
        error_boundary=trajectory.boundary or None,
        error=trajectory.error or None,
        prompt_tokens=len(talk.ids) - trajectory.sampled_tokens,
        sampled_tokens=trajectory.sampled_tokens,
        seconds=trajectory.seconds,
        metrics=dict(score.metrics) if score else {},
        messages=[m.as_dict() for m in trajectory.messages],
        token_ids=talk.ids or None,
        sampled_mask=talk.sampled or None,
        logprobs=talk.logprobs or None,
        steps=[
            StepRow(
                s.action.as_message().as_dict(),
                [m.as_dict() for m in s.observation.messages],
                s.sampled_tokens,
                s.milliseconds,
            )
            for s in trajectory.steps
        ],
        checks=[CheckRow(c.name, c.kind, c.required, c.passed, c.detail) for c in score.checks] if score else [],
    )


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
