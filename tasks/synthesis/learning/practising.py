"""Practice: a generalist that is made first goes on by itself with what it has learnt from solutions, with GRPO, on all
that it half knows.

What it was shown it mixes up where it is alike, and what the bare base could do it may have lost. So what has learnt
plays diagnosis tasks, and a training behind it draws every family of the target by what there is to learn in it
(`focus_weights`). Practice gives a family up where its siblings pay more: what it began from is kept, and a training
for what the generalist lacks then may begin there (`tasks/synthesis/starting.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from db import GENERALIST, AdapterRow, AdapterState, row_id
from environments.picking import spread
from environments.synthesized.composed import ComposedEnvironment
from errors import Untrainable
from tasks.measuring.lineup import TRIED, held, load_member
from tasks.round.adapters import BEFORE_PRACTICE, adapter_id, before_practice, finish_adapter
from tasks.round.context import Context
from tasks.round.results import LEARNT, SynthesizeResult, TrainResult
from tasks.round.rollouts import episodes_for, success_by_family
from tasks.synthesis.calibration import focus_weights
from tasks.synthesis.environments import stored_environment
from tasks.synthesis.learning.course import Course, apart
from tasks.synthesis.learning.recalling import Learnt
from tasks.synthesis.learning.training import train_on

logger = logging.getLogger("trace")


def practised(context: Context, learnt: Learnt) -> TrainResult:
    """The round's generalist: what has `learnt`, after `train.practice` steps of GRPO. Where no checkpoint of these is
    better, or no step is made, the generalist is what has learnt, as it is."""
    before = learnt.adapter
    environment = stored_environment(context.store, context.round, context.target, GENERALIST, context.keep)
    assert isinstance(environment, ComposedEnvironment)
    ids = _tried(context, before)
    context.registry.end_run(learnt.run)
    course = Course(
        name=GENERALIST,
        environment=practice_of(environment, success_by_family(context.store, ids)),
        adapter=adapter_id(context.round.id, GENERALIST),
        folder=context.folder / "training" / GENERALIST,
        steps=context.settings.train.practice,
        capability_id=row_id(context.round.id, GENERALIST),
        environment_id=context.result(SynthesizeResult, GENERALIST).environment,
        # Neither judged nor tried on the target early: there is no environment to be made anew.
        judged=False,
        transfers=False,
    )
    try:
        trained = train_on(context, course, context.files.fetch(before.path))
        reason = trained.unused
    except Untrainable as problem:
        reason = str(problem)
    if not reason:
        return trained.model_copy(update={"before": before.id})
    logger.warning("the generalist is what it has learnt, and nothing of its practice is kept: %s", reason)
    return _unpractised(context, course, learnt, reason)


def _tried(context: Context, before: AdapterRow) -> list[str]:
    """Trajectory ids of what has learnt on the diagnosis tasks that say what it half knows."""
    diagnosis = context.tasks("diagnosis")
    tasks = spread(diagnosis, context.settings.evaluation.routed(len(diagnosis)))
    with held(context, load_member(context, BEFORE_PRACTICE, before.id)) as name:
        ground = apart(context.ground(TRIED), before.id)
        return context.engine.play(ground, episodes_for(tasks, 1, context.seed, name), "diagnosis, before practice")


def practice_of(environment: ComposedEnvironment, known: Mapping[str, float]) -> ComposedEnvironment:
    """The generalist's environment with every family of the target as its own, drawn by what there is to learn in each
    where success is as `known`: what is mastered, and what never succeeds, hardly ever."""
    families = tuple(sorted(environment.generators.families()))
    spec = replace(environment.spec, families=families, retention_families=(), retention_share=0.0)
    return ComposedEnvironment(environment.target, spec).weighing(focus_weights(families, known))


def practice_episodes(context: Context) -> dict[str, str]:
    """Purpose by trajectory id of what was played for the practice of the round's generalist: by what had learnt, and
    in the training behind it."""
    before = before_practice(context.store, context.round.id)
    if before is None:
        return {}
    played_by = [before.id, adapter_id(context.round.id, GENERALIST)]
    columns = ["id", "adapter_id", "purpose", "environment"]
    frame = context.store.trajectory_frame(context.round.id, columns=columns, adapter_id=played_by)
    drawn = frame[frame["purpose"].eq("training")]["environment"]
    tried = frame["adapter_id"].eq(before.id) & frame["purpose"].eq(TRIED)
    frame = frame[frame["environment"].isin(drawn) | tried]
    return dict(zip(frame["id"], frame["purpose"], strict=True))


def _unpractised(context: Context, course: Course, learnt: Learnt, reason: str) -> TrainResult:
    """The generalist that has the weights of what has `learnt`, under the run of its practice."""
    adapter, steps, key = learnt.adapter, learnt.steps, f"{context.round.id}-{course.folder.name}"
    digest = finish_adapter(context, course.adapter, context.files.fetch(adapter.path), course.folder / "final")
    # Its practice began with settings of its own.
    context.store.set_state(AdapterRow, course.adapter, AdapterState.TRAINED, config=adapter.config)
    run = context.part_run(key, GENERALIST, capability=GENERALIST, kind="training")
    made = {"adapter": course.adapter, "sha256": digest, "run": run, "before": adapter.id, "unkept": reason}
    return TrainResult(**made, steps=steps, ending=LEARNT, chosen=steps)
