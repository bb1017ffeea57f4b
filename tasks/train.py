"""Stage 5, `trace-agent stage train`: GRPO trains one LoRA adapter on the environment of a capability, and of its
checkpoints the best on fresh seeds is taken (method, section 5; the trainer is `models.training.grpo`)."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

from db import GENERALIST, AdapterRow, AdapterState, TrainingStepRow, row_id
from environments.sandbox.workers import ModuleError
from environments.synthesized.hints import is_advised
from errors import Untrainable
from models.adapters.files import adapter_digest, export_adapter
from models.adapters.runs import RunLog
from models.episodes import Trajectory
from models.telemetry.metrics import METRICS
from models.training.checkpoints import fetch_further, put_training
from models.training.grpo import PAUSED, StepRecord, TrainingResult, TrainingSettings, train_adapter
from models.training.records import levels_of
from settings import Settings
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.round.engine import Playground, row_of
from tasks.round.progress import Meter, Stopwatch
from tasks.round.results import (
    LEARNT,
    CalibrateResult,
    SynthesizeResult,
    TrainResult,
    told_starts,
)
from tasks.round.rollouts import round_seed
from tasks.round.stage import stage
from tasks.synthesis.calibration import HINT
from tasks.synthesis.choosing import choice_metrics
from tasks.synthesis.environments import stored_environment
from tasks.synthesis.learning.course import Course, check_alive, check_transfer, choose, tasks_to_try
from tasks.synthesis.learning.generalist import comes_first, learn_generalist
from tasks.synthesis.learning.played_before import groups_before
from tasks.synthesis.limited import limited
from tasks.synthesis.starting import (
    champion_start,
    chosen_start,
    families_to_keep,
    focused,
    keeping,
    start_config,
    start_metrics,
    start_params,
    starts_of,
)
from tasks.synthesis.transfer import VERDICT as NOT_TRANSFERRED
from tasks.synthesis.transfer import first_third, transfer_metrics

logger = logging.getLogger("trace")

# The verdict on an adapter that could not be trained: the others of its round go on.
FAILED = "training-failed"


def training_settings(s: Settings, number: int = 1) -> TrainingSettings:
    """The trainer's settings in round `number` (from 1), from the round's."""
    t = s.train
    return TrainingSettings(
        steps=s.training_steps(),
        groups=t.groups,
        group_size=t.group_size,
        collections=t.collections,
        solved=t.solved,
        rank=t.rank,
        alpha=t.alpha,
        learning_rate=t.learning_rate,
        schedule=t.schedule,
        shuffled=t.shuffled,
        scaled=t.scaled,
        delta=t.delta,
        temperature=t.temperature,
        max_tokens=s.rollout.max_tokens,
        upper_layers=t.upper_layers,
        micro_batch=t.micro_batch,
        micro_batch_tokens=t.micro_batch_tokens,
        recompute=s.devices.recompute,
        hints=t.hints,
        seed=round_seed(s.seed, number),
    )


@stage("train", title="train {capability}")
def train(context: Context, capability: str) -> TrainResult:
    """GRPO on the capability's environment, from the weights of its champion or from zero; with `train.carry` from
    whichever weights do best there, the generalist's among them where that came first. Goes on from the last whole
    checkpoint. The generalist learns from what has succeeded instead. One that cannot be trained, or whose written
    module gives no scenarios any more, ends with its own adapter, not with the round."""
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
        row = context.store.row(AdapterRow, id=identity) or _stored(context, capability, identity, wanted)
        logger.warning("%s is not trained any further: %s", capability, problem)
        config = {**row.config, FAILED: str(problem)}
        context.store.set_state(AdapterRow, identity, AdapterState.FAILED, config=config)
        return _failed(context, capability, version, row, str(problem))


def _failed(context: Context, capability: str, version: int, row: AdapterRow, why: str) -> TrainResult:
    key = f"{context.round.id}-{_folder_name(capability, version)}"
    run = context.part_run(key, capability, capability=capability, kind="training")  # the one that was begun, if any
    done, verdict = len(context.store.rows(TrainingStepRow, adapter_id=row.id)), f"{FAILED}: {why}"
    began = {name: row.config[name] for name in ("start", "starts", "keeps", "began") if name in row.config}
    given = {"adapter": row.id, "sha256": "", "steps": done, "run": run, "ending": "failed", "chosen": 0}
    return TrainResult(**given, verdict=verdict, **began)


def _stored(context: Context, capability: str, identity: str, wanted: TrainingSettings) -> AdapterRow:
    """The row of an adapter whose training has not begun."""
    row = AdapterRow(
        id=identity,
        round_id=context.round.id,
        capability_id=row_id(context.round.id, capability),
        environment_id=context.result(SynthesizeResult, capability).environment,
        base=context.base.identity.base,
        base_revision=context.base.identity.revision,
        state=AdapterState.TRAINING,
        config=wanted.told(),
    )
    context.store.put([row])
    return row


def _folder_name(capability: str, version: int) -> str:
    return capability if version == 1 else f"{capability}-{version}"


def _specialist(context: Context, capability: str, wanted: TrainingSettings) -> TrainResult:
    start, began = champion_start(context, capability, wanted)
    course = replace(course_of(context, capability), began=began)
    stored = course.environment
    course = replace(course, environment=focused(context, capability, stored))
    if context.settings.train.carry or comes_first(context):
        course = replace(course, starts=starts_of(context, course.adapter, course.environment, wanted, start))
        start = chosen_start(context, course.starts)
        keeps = families_to_keep(context, course.environment, start)
        course = replace(course, environment=keeping(context, course.environment, keeps), keeps=keeps)
    course = replace(course, ready=groups_before(context, capability, stored, start.adapter if start else None))
    if course.ready.learn:
        logger.info(
            "first step for %s: groups that its calibration has played: %d", capability, len(course.ready.learn)
        )
    if course.starts:
        logger.info("training for %s %s", capability, told_starts(course.starts, course.keeps))
    return train_on(context, course, start.folder if start else None)


def _generalist(context: Context, wanted: TrainingSettings) -> TrainResult:
    learnt = learn_generalist(context, context.result(SynthesizeResult, GENERALIST).environment, wanted)
    if learnt is None:
        why = "nothing has succeeded, so there is nothing to learn from"
        identity = adapter_id(context.round.id, GENERALIST)
        return TrainResult(adapter=identity, sha256="", steps=0, run="", ending="nothing", chosen=0, verdict=why)
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


def train_on(context: Context, course: Course, start: Path | None = None) -> TrainResult:
    """Train an adapter from the weights in `start` (an adapter's folder) or from zero, and choose among its
    checkpoints. Whatever was done before the process died is not done again."""
    round_id, environment, identity = context.round.id, course.environment, course.adapter
    settings = training_settings(context.settings, context.round.number)
    solved = course.solved or settings.solved
    settings = replace(settings, patience=course.patience, solved=solved, judged=course.judged)
    if start:  # what an adapter has learnt, the rate that teaches from zero would undo
        settings = replace(settings, learning_rate=context.settings.train.carry_rate or settings.learning_rate)
    if not course.hinted:
        settings = replace(settings, hints=0.0)
    if course.steps is not None:
        settings = replace(settings, steps=course.steps)
    if context.budget is not None:
        settings = replace(settings, most_episodes=context.budget.for_training(identity))
    digest_of_start = adapter_digest(start) if start else ""
    context.store.put(
        [
            AdapterRow(
                id=identity,
                round_id=round_id,
                capability_id=course.capability_id,
                environment_id=course.environment_id,
                base=context.base.identity.base,
                base_revision=context.base.identity.revision,
                state=AdapterState.TRAINING,
                config=settings.told() | start_config(digest_of_start, course.starts, course.keeps, course.began),
            )
        ],
    )
    output = course.folder
    ground = Playground(
        environment.environment,
        environment.spec.id,
        "training",
        settings.temperature,
        settings.max_tokens,
        identity,
    )
    run = context.part_run(f"{round_id}-{output.name}", course.name, capability=course.name, kind="training")
    log = RunLog(context.registry, run)
    log.params({k: v for k, v in settings.told().items() if v is not None})
    if course.starts:
        log.params(start_params(course.starts))
        log.metrics(start_metrics(course.starts))

    storing = Stopwatch()

    def on_step(record: StepRecord) -> None:
        context.still_ours()
        with storing:
            context.store.put([step_row(identity, record)], replace=True)
            context.registry.log_steps(run, {record.step: step_metrics(record)})
            METRICS.trained(course.name, record.step, record.reward, record.success)
            meter.advance(told(record), say=True)

    def on_trajectories(step: int, trajectories: list[Trajectory]) -> None:
        with storing:
            told = {True: replace(ground, group=HINT), False: ground}
            rows = [
                row_of(t, told[is_advised(t.episode.task)], context.origin, row_id(identity, t.episode.key))
                for t in trajectories
            ]
            context.store.add_trajectories(rows)
            METRICS.stored(rows)
            # Charged after they are stored: `for_training` takes the stored ones for this training's own.
            if context.budget is not None:
                context.budget.admit([row.id for row in rows], ground.purpose)

    fetch_further(context.files, output)
    done = len(context.store.rows(TrainingStepRow, adapter_id=identity))

    def saved() -> None:
        with storing:
            put_training(context.files, output)

    def make_steps(until: int | None) -> TrainingResult:
        stored = storing.seconds
        with Stopwatch() as training:
            actor = context.backend.actor(context.probe.ids, f"{course.name}@{round_id}")
            source = limited(environment, context.limits, identity)
            given = source, actor, context.base.renderer, settings, output, on_step, on_trajectories
            made = train_adapter(*given, start, until, saved, course.ready)
        context.environment.seconds += made.environment_seconds
        context.model.seconds += training.seconds - (storing.seconds - stored) - made.environment_seconds
        return made

    with Meter(f"train {course.name}", settings.steps, "steps", done) as meter:
        tasks = tasks_to_try(context, course)
        third = first_third(settings.steps) if tasks else None
        result = make_steps(third)
        transfer = check_transfer(context, course, result, tasks, third, start is not None) if third else None
        if transfer is not None and transfer.verdict:
            result = replace(result, ending=NOT_TRANSFERRED, verdict=transfer.verdict)
        elif result.ending == PAUSED:
            result = make_steps(None)
    with Stopwatch() as choosing:
        choice = choose(context, identity, environment, result, warm=start is not None)
    context.registry.log_steps(run, {c.step: choice_metrics(c, choice.step) for c in choice.figures})
    if transfer is not None:
        context.registry.log_steps(run, {transfer.step: transfer_metrics(transfer)})
    folder = output / "final"
    context.still_ours()  # what another process has stored there is what its digest says
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that died between export and the end of the stage
    export_adapter(result.weights[choice.step], folder)
    digest = adapter_digest(folder)
    path = str(folder.relative_to(context.settings.folder))
    context.files.put(path)
    context.store.set_state(AdapterRow, identity, AdapterState.TRAINED, sha256=digest, path=path)
    return TrainResult(
        adapter=identity,
        sha256=digest,
        verdict=result.verdict,
        steps=len(result.records),
        run=run,
        ending=result.ending,
        chosen=choice.step,
        choice=list(choice.figures),
        choosing_seconds=round(choosing.seconds, 3),
        start=digest_of_start,
        starts=list(course.starts),
        keeps=list(course.keeps),
        began=course.began,
        level=result.records[-1].level if levels_of(environment)[1] > 1 and result.records else None,
        transfer=transfer,
    )


def step_row(adapter: str, record: StepRecord) -> TrainingStepRow:
    """What the store keeps of a step: reward and success are those of the capability's own scenarios."""
    return TrainingStepRow(
        adapter_id=adapter,
        step=record.step,
        reward=record.reward,
        success=record.success,
        loss=record.loss,
        clip_fraction=record.clip_fraction,
        kl=record.kl,
        logprob_gap=record.logprob_gap,
        seconds=record.seconds,
        metrics=record.metrics,
    )


def step_metrics(record: StepRecord) -> dict[str, float]:
    """A step's figures as MLflow metrics; `train/own_success` is that of the capability's own scenarios."""
    names = ("loss", "clip_fraction", "kl", "logprob_gap", "seconds")
    return {f"train/{n}": float(getattr(record, n)) for n in names} | {
        f"train/{k}": v for k, v in record.metrics.items()
    }


def told(record: StepRecord) -> str:
    """A step in a line of progress."""
    if record.success is None or record.reward is None:
        return "every episode on the capability's own scenarios was lost"
    retention = record.metrics.get("retention_success")
    kept = "" if retention is None else f", retention {100 * retention:.0f} %"
    return f"success {100 * record.success:.0f} %, reward {record.reward:.2f}{kept}"
