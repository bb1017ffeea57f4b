"""Stage 5, `trace-agent stage train`: GRPO trains one LoRA adapter on the environment of a capability, and of its
checkpoints the best on fresh seeds is taken (method, section 5; the trainer is `models.training.grpo`)."""

from __future__ import annotations

import logging
from dataclasses import replace

from db import GENERALIST, AdapterRow, AdapterState, TrainingStepRow, row_id
from environments.sandbox.workers import ModuleError
from errors import Untrainable
from models.training.records import TrainingSettings
from tasks.round.adapters import BEFORE_PRACTICE, adapter_id, begin_adapter
from tasks.round.context import Context
from tasks.round.results import (
    LEARNT,
    CalibrateResult,
    SynthesizeResult,
    TrainResult,
    starts_text,
)
from tasks.round.stage import stage
from tasks.synthesis.bank import MODULE_AT_FAULT
from tasks.synthesis.environments import stored_environment
from tasks.synthesis.learning.course import Course, check_alive
from tasks.synthesis.learning.generalist import comes_first, learn_generalist
from tasks.synthesis.learning.played_before import groups_before
from tasks.synthesis.learning.practising import practised
from tasks.synthesis.learning.training import train_on, training_settings
from tasks.synthesis.starting import (
    champion_start,
    chosen_start,
    families_to_keep,
    focused,
    keeping,
    starts_of,
)

logger = logging.getLogger("trace")

# The verdict on an adapter that could not be trained: the others of its round go on.
FAILED = "training-failed"


@stage("train", title="train {capability}")
def train(context: Context, capability: str) -> TrainResult:
    """GRPO on the capability's environment, from the weights of its champion or from zero; with `train.carry` from
    whichever weights do best there, the generalist's among them where that came first. Goes on from the last whole
    checkpoint. The generalist learns from what has succeeded instead, and may practise then. One that
    cannot be trained, or whose written module gives no scenarios any more, ends with its own adapter, not with the
    round."""
    version = 1 if capability == GENERALIST else context.result(SynthesizeResult, capability).versions
    identity = adapter_id(context.round.id, capability, version)
    row = context.store.row(AdapterRow, id=identity)
    if row is not None and row.state == AdapterState.FAILED:  # a process died between that and the end of the stage
        return _failed(context, capability, version, row, str(row.config[FAILED]))
    wanted = training_settings(context.settings, context.round.number)
    try:
        if capability == GENERALIST:
            result = _generalist(context, wanted)
        else:
            result = _specialist(context, capability, wanted)
        if result.goes_on:
            check_alive(context, capability, identity)
        return result
    except (Untrainable, ModuleError) as problem:
        # A module may fail when the first scenario is drawn, before anything of its adapter is stored.
        row = context.store.row(AdapterRow, id=identity) or _untrained(context, capability, identity, wanted)
        logger.warning("%s is not trained any further: %s", capability, problem)
        config = {**row.config, FAILED: str(problem), MODULE_AT_FAULT: isinstance(problem, ModuleError)}
        context.store.set_state(AdapterRow, identity, AdapterState.FAILED, config=config)
        return _failed(context, capability, version, row, str(problem))


def _failed(context: Context, capability: str, version: int, row: AdapterRow, why: str) -> TrainResult:
    folder = _folder_name(capability, version)
    if capability == GENERALIST:
        learning = context.store.row(AdapterRow, id=adapter_id(context.round.id, BEFORE_PRACTICE))
        folder = BEFORE_PRACTICE if learning is not None and not learning.path else folder
    key = f"{context.round.id}-{folder}"
    run = context.part_run(key, capability, capability=capability, kind="training")  # the one that was begun, if any
    done, verdict = len(context.store.rows(TrainingStepRow, adapter_id=row.id)), f"{FAILED}: {why}"
    began = {name: row.config[name] for name in ("start", "starts", "keeps", "began") if name in row.config}
    given = {"adapter": row.id, "sha256": "", "steps": done, "run": run, "ending": "failed", "chosen": 0}
    return TrainResult(**given, verdict=verdict, **began)


def _untrained(context: Context, capability: str, identity: str, wanted: TrainingSettings) -> AdapterRow:
    """The row of an adapter that failed before its training began, stored now."""
    environment_id = context.result(SynthesizeResult, capability).environment
    begin_adapter(context, identity, row_id(context.round.id, capability), environment_id, wanted.as_json())
    row = context.store.row(AdapterRow, id=identity)
    assert row is not None, "it has just been stored"
    return row


def _folder_name(capability: str, version: int) -> str:
    return capability if version == 1 else f"{capability}-{version}"


def _specialist(context: Context, capability: str, wanted: TrainingSettings) -> TrainResult:
    """Train on the capability's environment, from the start that does best there."""
    course = course_of(context, capability)
    # One that has begun goes on, whatever choosing among its checkpoints has taken since.
    begun = context.store.row(AdapterRow, id=course.adapter) is not None
    batch = wanted.groups * wanted.group_size
    if context.budget is not None and not begun and context.budget.for_training(course.adapter) < batch:
        # Before starts are compared: they would be paid for by what proves the others.
        return TrainResult(adapter=course.adapter, sha256="", steps=0, run="", ending="budget", chosen=0)
    start, began = champion_start(context, capability, wanted)
    environment, starts, keeps = focused(context, capability, course.environment), course.starts, course.keeps
    if context.settings.train.carry or comes_first(context):
        starts = starts_of(context, course.adapter, environment, wanted, start)
        start = chosen_start(context, starts)
        keeps = families_to_keep(context, environment, start)
        environment = keeping(context, environment, keeps)
    # Calibration has played the environment as it is stored.
    ready = groups_before(context, capability, course.environment, start.adapter if start else None)
    if ready.learn:
        logger.info("first step for %s: groups that its calibration has played: %d", capability, len(ready.learn))
    if starts:
        logger.info("training for %s %s", capability, starts_text(starts, keeps))
    course = replace(course, environment=environment, starts=starts, keeps=keeps, began=began, ready=ready)
    return train_on(context, course, start.folder if start else None)


def _generalist(context: Context, wanted: TrainingSettings) -> TrainResult:
    practises = context.settings.train.practice > 0 and comes_first(context)
    environment_id = None if practises else context.result(SynthesizeResult, GENERALIST).environment
    learnt = learn_generalist(context, environment_id, wanted, BEFORE_PRACTICE if practises else GENERALIST)
    if learnt is None:
        why = "nothing has succeeded, so there is nothing to learn from"
        identity = adapter_id(context.round.id, GENERALIST)
        return TrainResult(adapter=identity, sha256="", steps=0, run="", ending="nothing", chosen=0, verdict=why)
    if practises:
        return practised(context, learnt)
    row, steps = learnt.adapter, learnt.steps
    return TrainResult(adapter=row.id, sha256=row.sha256, steps=steps, run=learnt.run, ending=LEARNT, chosen=steps)


def course_of(context: Context, capability: str) -> Course:
    """What the capability's adapter is trained on: its environment's last version."""
    made, calibrated = context.result(SynthesizeResult, capability), context.found(CalibrateResult, capability)
    adapter = adapter_id(context.round.id, capability, made.versions)
    return Course(
        name=capability,
        environment=stored_environment(context.store, context.round, context.target, capability, context.keep),
        adapter=adapter,
        folder=context.folder / "training" / _folder_name(capability, made.versions),
        hinted=calibrated is not None and calibrated.hinted is not None,
        capability_id=row_id(context.round.id, capability),
        environment_id=made.environment,
    )
