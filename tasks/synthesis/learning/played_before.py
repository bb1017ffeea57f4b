"""What calibration has played of an environment, as groups of its training's first step: the same weights played it, at
the same temperature, for the same reward, so it need not be played twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from db import CalibrationRow, TrajectoryRow, row_id
from environments.contract import Score, TargetTask
from environments.picking import in_proportion
from environments.synthesized.composed import ComposedEnvironment
from errors import EnvironmentFault
from models.episodes import Episode, Termination, Trajectory
from models.opening import opened
from models.renderer import Conversation
from models.training.rollouts import PlayedBefore
from tasks.round.context import Context
from tasks.round.results import SynthesizeResult
from tasks.synthesis.calibration import calibration_tasks
from tasks.synthesis.environments import TrainingEnvironment
from tasks.synthesis.learning.generalist import beginning_of

logger = logging.getLogger("trace")


def groups_before(
    context: Context, capability: str, environment: TrainingEnvironment, adapter: str | None
) -> PlayedBefore:
    """Groups that calibration played with the weights of `adapter` (None: the base's) in the capability's stored
    `environment`; to learn from, those of unequal rewards, of each family its share, and as many as leave a first step
    its retention scenarios. None where training goes on from other weights than were calibrated, has groups of another
    size or with advice, or trains in an environment that a model wrote, whose calibration may be older."""
    if not isinstance(environment, ComposedEnvironment):
        return PlayedBefore()
    train, begun = context.settings.train, beginning_of(context, capability)
    made = context.result(SynthesizeResult, capability).environment
    measured = context.store.row(CalibrationRow, id=row_id(made, "calibration"))
    if measured is None or measured.detail.get("hinted") is not None:
        return PlayedBefore()
    calibrated = measured.detail.get("start", begun[1] if begun else "")  # an earlier version did not store it
    if (adapter or "") != calibrated or context.settings.calibration.samples != train.group_size:
        return PlayedBefore()
    known = measured.detail.get("known")
    tasks = calibration_tasks(environment, context.settings.calibration.seeds, context.round.number, known)
    rows: dict[str, list[TrajectoryRow]] = {task.id: [] for task in tasks}
    played = {"environment": environment.spec.id, "policy_id": measured.policy_id, "group_id": None}
    for row in context.store.trajectories(None, with_blobs=True, purpose="calibration", **played):
        if row.task_id in rows and row.reward is not None and row.token_ids is not None:
            rows[row.task_id].append(row)
    most = train.groups - round(train.groups * environment.spec.retention_share)
    whole = [
        g
        for task in tasks
        if len(rows[task.id]) == train.group_size
        if (g := _group(context, environment, task, rows[task.id]))
    ]
    learn = _of_all_families([g for g in whole if len({_reward(t) for t in g}) > 1])[:most]
    return PlayedBefore(learn, [g for g in whole if g not in learn])


def _of_all_families(groups: Sequence[list[Trajectory]]) -> list[list[Trajectory]]:
    """The groups so that the first of them, however many a step takes, are of each family in its share: with
    `train.focus` calibration has its scenarios family by family."""
    families: dict[str, list[list[Trajectory]]] = {}
    for group in groups:
        families.setdefault(group[0].episode.task.family, []).append(group)
    return in_proportion(families.values())


def _reward(played: Trajectory) -> float:
    assert played.score is not None
    return round(played.score.reward, 6)


def _group(
    context: Context, environment: ComposedEnvironment, task: TargetTask, rows: Sequence[TrajectoryRow]
) -> list[Trajectory]:
    """The stored episodes of a scenario as the trainer takes them. None where the scenario begins otherwise today, or
    does not open: training, which may draw it, loses its episodes then as calibration would."""
    try:
        prompt, first = opened(environment.environment, task)
    except EnvironmentFault as problem:
        logger.warning("%s did not open again, so what calibration has played of it is left: %s", task.id, problem)
        return []
    plain = context.base.renderer.start(prompt, first)
    identity = context.policy.identity(None)
    group = []
    for row in sorted(rows, key=lambda row: row.trial):
        assert row.token_ids is not None
        assert row.sampled_mask is not None
        assert row.logprobs is not None
        ids = [int(i) for i in row.token_ids]
        if ids[: len(plain.ids)] != plain.ids:
            return []
        sampled, logprobs = [bool(s) for s in row.sampled_mask], [float(p) for p in row.logprobs]
        talk = Conversation(ids, sampled, logprobs, plain.shared)
        score = Score(float(row.reward or 0), bool(row.success))
        episode = Episode(row.id, task, row.seed, row.trial)
        group.append(Trajectory(episode, identity, (), (), talk, Termination(row.termination), score, row.seconds))
    return group
