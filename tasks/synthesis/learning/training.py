"""One training of one adapter, from the row that it begins with to the weights that are taken: GRPO on the environment
of a course, what is stored of each step, and the choice among its checkpoints (method, section 5)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from db import TrainingStepRow, row_id
from environments.synthesized.hints import is_advised
from models.adapters.files import adapter_digest
from models.adapters.runs import RunLog
from models.episodes import Trajectory
from models.telemetry.metrics import METRICS
from models.training.checkpoints import fetch_further, forget_later, put_training
from models.training.grpo import PAUSED, StepRecord, TrainingResult, TrainingSettings, train_adapter
from models.training.records import levels_of
from settings import Settings
from tasks.round.adapters import begin_adapter, finish_adapter
from tasks.round.context import Context
from tasks.round.engine import Playground, row_of
from tasks.round.results import TrainResult, TransferFigures
from tasks.round.rollouts import round_seed
from tasks.synthesis.calibration import HINT
from tasks.synthesis.choosing import choice_metrics
from tasks.synthesis.learning.course import Course, check_transfer, choose, tasks_to_try
from tasks.synthesis.limited import limited
from tasks.synthesis.starting import start_config, start_metrics, start_params
from tasks.synthesis.transfer import VERDICT as NOT_TRANSFERRED
from tasks.synthesis.transfer import first_third, transfer_metrics
from tasks.unattended.progress import Meter, Stopwatch


def training_settings(s: Settings, number: int = 1) -> TrainingSettings:
    """The trainer's settings in round `number` (from 1), from the round's."""
    t = s.train
    return TrainingSettings(
        steps=s.training_steps(),
        groups=t.groups,
        group_size=t.group_size,
        collections=t.collections,
        patience=t.patience,
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


def settings_of_course(context: Context, course: Course, start: Path | None) -> TrainingSettings:
    """The trainer's settings for this course: the round's, with what the course, its start and the budget change."""
    settings = training_settings(context.settings, context.round.number)
    steps = settings.steps if course.steps is None else course.steps
    most = context.budget.for_training(course.adapter) if context.budget is not None else None
    patience = course.patience
    if patience is None and settings.patience:
        # It is paid for by what other steps do not need: a training plays no more than its round has planned.
        patience = min(settings.patience, max(0, steps - 1) * settings.collections)
        planned = steps * settings.groups * settings.group_size * settings.collections
        most = planned if most is None else min(most, planned)
    return replace(
        settings,
        patience=patience or 0,
        judged=course.judged,
        solved=course.solved or settings.solved,
        steps=steps,
        hints=settings.hints if course.hinted else 0.0,
        # The rate that teaches from zero would undo what an adapter has learnt.
        learning_rate=(context.settings.train.carry_rate if start else None) or settings.learning_rate,
        most_episodes=most,
    )


def train_on(context: Context, course: Course, start: Path | None = None) -> TrainResult:
    """Train an adapter from the weights in `start` (an adapter's folder) or from zero, and choose among its
    checkpoints. Whatever was done before the process died is not done again."""
    settings = settings_of_course(context, course, start)
    digest_of_start = adapter_digest(start) if start else ""
    config = settings.as_json() | start_config(digest_of_start, course.starts, course.keeps, course.began)
    begin_adapter(context, course.adapter, course.capability_id, course.environment_id, config)
    run = _begin_run(context, course, settings)
    stored = max((row.step for row in context.store.rows(TrainingStepRow, adapter_id=course.adapter)), default=0)
    if stored:  # else what was put there is of another database's round of this id
        fetch_further(context.files, course.folder)
    context.still_ours()
    forget_later(course.folder, stored)
    result, transfer = _trained(context, course, settings, start, run)
    with Stopwatch() as choosing:
        choice = choose(context, course.adapter, course.environment, result, warm=start is not None)
    context.registry.log_steps(run, {c.step: choice_metrics(c, choice.step) for c in choice.figures})
    if transfer is not None:
        context.registry.log_steps(run, {transfer.step: transfer_metrics(transfer)})
    digest = finish_adapter(context, course.adapter, result.weights[choice.step], course.folder / "final")
    return TrainResult(
        adapter=course.adapter,
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
        level=result.records[-1].level if levels_of(course.environment)[1] > 1 and result.records else None,
        transfer=transfer,
    )


def _begin_run(context: Context, course: Course, settings: TrainingSettings) -> str:
    """MLflow's run of the training, begun or resumed, with its parameters."""
    key = f"{context.round.id}-{course.folder.name}"
    run = context.part_run(key, course.name, capability=course.name, kind="training")
    log = RunLog(context.registry, run)
    log.params({k: v for k, v in settings.as_json().items() if v is not None})
    if course.starts:
        log.params(start_params(course.starts))
        log.metrics(start_metrics(course.starts))
    return run


def _trained(
    context: Context, course: Course, settings: TrainingSettings, start: Path | None, run: str
) -> tuple[TrainingResult, TransferFigures | None]:
    """All steps, and what the check after a third of them found (None: there was none). Where that says that what was
    learnt does not carry over to the target, the other steps are not made."""
    done = len(context.store.rows(TrainingStepRow, adapter_id=course.adapter))
    with Meter(f"train {course.name}", settings.steps, "steps", done) as meter:
        trainer = _Trainer(context, course, settings, start, run, meter)
        tasks = tasks_to_try(context, course)
        third = first_third(settings.steps) if tasks else None
        if third is None:
            return trainer.train(), None
        result = trainer.train(until=third)
        transfer = check_transfer(context, course, result, tasks, third, start is not None)
        if transfer is not None and transfer.verdict:
            return replace(result, ending=NOT_TRANSFERRED, verdict=transfer.verdict), transfer
        return trainer.train() if result.ending == PAUSED else result, transfer


@dataclass
class _Trainer:
    """Trains one course, and stores what it plays and learns while it does. `storing` adds up the seconds which that
    takes: they are neither the model's nor the environment's."""

    context: Context
    course: Course
    settings: TrainingSettings
    start: Path | None
    run: str
    meter: Meter
    storing: Stopwatch = field(default_factory=Stopwatch)

    def train(self, until: int | None = None) -> TrainingResult:
        """Make the steps that are missing, up to `until` or all."""
        context, course = self.context, self.course
        stored_before = self.storing.seconds
        with Stopwatch() as training:
            result = train_adapter(
                limited(course.environment, context.limits, course.adapter),
                context.backend.actor(context.probe.ids, f"{course.name}@{context.round.id}"),
                context.base.renderer,
                self.settings,
                course.folder,
                self._store_step,
                on_trajectories=self._store_episodes,
                start=self.start,
                until=until,
                on_saved=self._put_checkpoint,
                ready=course.ready,
            )
        context.environment.seconds += result.environment_seconds
        stored = self.storing.seconds - stored_before
        context.model.seconds += training.seconds - stored - result.environment_seconds
        return result

    def _store_step(self, record: StepRecord) -> None:
        self.context.still_ours()
        with self.storing:
            self.context.store.put([step_row(self.course.adapter, record)], replace=True)
            self.context.registry.log_steps(self.run, {record.step: step_metrics(record)})
            METRICS.trained(self.course.name, record.step, record.reward, record.success)
            self.meter.advance(step_line(record), say=True)

    def _store_episodes(self, step: int, trajectories: list[Trajectory]) -> None:
        context, adapter = self.context, self.course.adapter
        environment = self.course.environment
        plain = Playground(
            environment.environment,
            environment.spec.id,
            "training",
            self.settings.temperature,
            self.settings.max_tokens,
            adapter,
        )
        advised = replace(plain, group=HINT)
        with self.storing:
            rows = [
                row_of(
                    t,
                    advised if is_advised(t.episode.task) else plain,
                    context.origin,
                    row_id(adapter, t.episode.key),
                )
                for t in trajectories
            ]
            context.store.add_trajectories(rows)
            METRICS.stored(rows)
            # Charged after they are stored: `for_training` takes the stored ones for this training's own.
            if context.budget is not None:
                context.budget.admit([row.id for row in rows], plain.purpose)

    def _put_checkpoint(self) -> None:
        with self.storing:
            put_training(self.context.files, self.course.folder)


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


def step_line(record: StepRecord) -> str:
    """A step in a line of progress."""
    if record.success is None or record.reward is None:
        return "every episode on the capability's own scenarios was lost"
    retention = record.metrics.get("retention_success")
    kept = "" if retention is None else f", retention {100 * retention:.0f} %"
    return f"success {100 * record.success:.0f} %, reward {record.reward:.2f}{kept}"
