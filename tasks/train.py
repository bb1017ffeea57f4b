"""Stage 5, `trace-agent stage train`: GRPO trains one LoRA adapter on the environment of a capability (method,
section 5; the trainer is `models.training.grpo`)."""

from __future__ import annotations

import shutil
from dataclasses import asdict

from db import AdapterRow, AdapterState, TrainingStepRow, row_id
from models.adapters.files import adapter_digest, export_adapter
from models.episodes import Trajectory
from models.training.grpo import StepRecord, TrainingSettings, train_adapter
from settings import Settings
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.round.engine import Playground, row_of
from tasks.round.progress import Meter, Stopwatch
from tasks.round.results import SynthesizeResult, TrainResult
from tasks.round.stage import stage
from tasks.synthesis.environments import stored_environment


def training_settings(s: Settings) -> TrainingSettings:
    """The trainer's settings, from the round's."""
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
        temperature=t.temperature,
        max_tokens=s.rollout.max_tokens,
        upper_layers=t.upper_layers,
        micro_batch=t.micro_batch,
        seed=s.seed,
    )


@stage("train", title="train {capability}")
def train(context: Context, capability: str) -> TrainResult:
    """GRPO on the capability's environment; goes on from the last whole checkpoint."""
    round_id = context.round.id
    environment = stored_environment(context.store, context.round, context.target, capability, context.keep)
    settings = training_settings(context.settings)
    identity = adapter_id(round_id, capability)
    context.store.put(
        [
            AdapterRow(
                id=identity,
                round_id=round_id,
                capability_id=row_id(round_id, capability),
                environment_id=context.result(SynthesizeResult, capability).environment,
                base=context.base.identity.base,
                base_revision=context.base.identity.revision,
                state=AdapterState.TRAINING,
                config=asdict(settings),
            )
        ],
    )
    output = context.folder / "training" / capability
    ground = Playground(
        environment.environment,
        environment.spec.id,
        "training",
        settings.temperature,
        settings.max_tokens,
        identity,
    )
    run = context.registry.start_run(f"{round_id}-{capability}", {"round": round_id, "capability": capability})

    storing = Stopwatch()

    def on_step(record: StepRecord) -> None:
        with storing:
            context.store.put([TrainingStepRow(adapter_id=identity, **asdict(record))], replace=True)
            context.registry.log_steps(run, {record.step: step_metrics(record)})
            meter.advance(f"success {100 * record.success:.0f} %, reward {record.reward:.2f}", say=True)

    def on_trajectories(step: int, trajectories: list[Trajectory]) -> None:
        with storing:
            rows = [row_of(t, ground, context.origin, row_id(identity, t.episode.key)) for t in trajectories]
            context.store.add_trajectories(rows)

    done = len(context.store.rows(TrainingStepRow, adapter_id=identity))
    with Stopwatch() as training, Meter(f"train {capability}", settings.steps, "steps", done) as meter:
        actor = context.backend.actor(context.probe.ids, f"{capability}@{round_id}")
        result = train_adapter(environment, actor, context.base.renderer, settings, output, on_step, on_trajectories)
    context.environment.seconds += result.environment_seconds
    context.model.seconds += training.seconds - storing.seconds - result.environment_seconds
    folder = output / "final"
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that died between export and the end of the stage
    export_adapter(result.folder, folder)
    digest = adapter_digest(folder)
    context.store.set_state(
        AdapterRow, identity, AdapterState.TRAINED, sha256=digest, path=str(folder.relative_to(context.settings.folder))
    )
    return TrainResult(adapter=identity, sha256=digest, verdict=result.verdict, steps=len(result.records), run=run)


def step_metrics(record: StepRecord) -> dict[str, float]:
    """A step's figures as MLflow metrics."""
    names = ("reward", "success", "loss", "clip_fraction", "kl", "logprob_gap", "seconds")
    return {f"train/{n}": float(getattr(record, n)) for n in names} | {
        f"train/{k}": v for k, v in record.metrics.items()
    }
