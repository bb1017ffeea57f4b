"""Stage 5: train one LoRA adapter per capability, register it, prove that it is live, and measure it on fresh seeds."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.artifacts import create_link_artifact

from db import row_id
from errors import AdapterError
from models.adapters.files import AdapterRecord, adapter_digest, export_adapter
from models.adapters.fingerprint import TAG as FINGERPRINT
from models.episodes import Episode, Trajectory
from models.training.grpo import StepRecord, TrainingSettings, train_adapter
from tasks.measuring.statistics import clustered_interval
from tasks.mine import RETRIES
from tasks.round.context import Context, Stopwatch, current
from tasks.round.policies import fingerprint_of, load_adapter, probe_ids, training_actor
from tasks.round.progress import Meter
from tasks.round.rollouts import Playground, outcomes, play_owed, trajectory_row
from tasks.synthesis.calibration import FRESH_SEED
from tasks.synthesize import stored_environment


def training_settings(context: Context) -> TrainingSettings:
    """The trainer's settings, from the round's."""
    s, t = context.settings, context.settings.train
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


def adapter_id(round_id: str, capability: str) -> str:
    """Id of a round's adapter for a capability."""
    return row_id(round_id, "adapter", capability)


@task(name="train", task_run_name="train {capability}", **RETRIES)
def train(round_id: str, capability: str, environment_id: str) -> dict[str, Any]:
    """GRPO on the capability's environment; goes on from the last whole checkpoint."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        environment, settings = stored_environment(context, capability), training_settings(context)
        identity = adapter_id(round_id, capability)
        context.store.put(
            "adapters",
            [
                {
                    "id": identity,
                    "round_id": round_id,
                    "capability_id": row_id(round_id, capability),
                    "environment_id": environment_id,
                    "base": context.base.identity.base,
                    "base_revision": context.base.identity.revision,
                    "state": "training",
                    "config": asdict(settings),
                }
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
                context.store.put("training_steps", [{"adapter_id": identity, **asdict(record)}], replace=True)
                context.registry.log_steps(run, {record.step: step_metrics(record)})
                meter.advance(f"success {100 * record.success:.0f} %, reward {record.reward:.2f}", say=True)

        def on_trajectories(step: int, trajectories: list[Trajectory]) -> None:
            with storing:
                rows = [trajectory_row(context, ground, t, row_id(identity, t.episode.key)) for t in trajectories]
                context.store.add_trajectories(rows)

        done = len(context.store.rows("training_steps", adapter_id=identity))
        with Stopwatch() as training, Meter(f"train {capability}", settings.steps, "steps", done) as meter:
            probe, _ = probe_ids(context.base, context.target.environment())
            actor = training_actor(context.policy, context.base, context.settings, probe, f"{capability}@{round_id}")
            result = train_adapter(
                environment, actor, context.base.renderer, settings, output, on_step, on_trajectories
            )
        context.environment.seconds += result.environment_seconds
        context.model.seconds += training.seconds - storing.seconds - result.environment_seconds
        folder = output / "final"
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that died between export and the end of the stage
        export_adapter(result.folder, folder)
        digest = adapter_digest(folder)
        context.store.set_state(
            "adapters", identity, "trained", sha256=digest, path=str(folder.relative_to(context.settings.folder))
        )
        return {
            "adapter": identity,
            "sha256": digest,
            "verdict": result.verdict,
            "steps": len(result.records),
            "run": run,
        }

    return context.stage(f"train:{capability}", work)


def step_metrics(record: StepRecord) -> dict[str, float]:
    """A step's figures as MLflow metrics."""
    names = ("reward", "success", "loss", "clip_fraction", "kl", "logprob_gap", "seconds")
    return {f"train/{n}": float(getattr(record, n)) for n in names} | {
        f"train/{k}": v for k, v in record.metrics.items()
    }


def load_trained(context: Context, capability: str) -> str:
    """Make a round's trained adapter usable in this process, hash checked. Returns the name to sample with."""
    row = context.store.row("adapters", id=adapter_id(context.round.id, capability))
    assert row is not None
    folder = context.settings.folder / row["path"]
    name, digest = load_adapter(context.policy, context.settings, folder, capability, context.round.id)
    if digest != row["sha256"]:
        raise AdapterError(
            f"adapter {capability!r} has hash {digest[:12]}, stored is {row['sha256'][:12]}; "
            "train it again with --fresh"
        )
    return name


@task(name="register", task_run_name="register {capability}", **RETRIES)
def register(round_id: str, capability: str, environment_id: str, run: str) -> dict[str, Any]:
    """Probe, measure on fresh seeds against the base, and register in MLflow as challenger."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        identity, environment = adapter_id(round_id, capability), stored_environment(context, capability)
        name = load_trained(context, capability)
        with context.model:
            proof = fingerprint_of(context.policy, context.base, context.target.environment(), name)
        moved = proof.largest_move
        rollout = context.settings.rollout
        ground = Playground(
            environment.environment,
            environment.spec.id,
            "evaluation",
            rollout.temperature,
            rollout.max_tokens,
            identity,
        )
        fresh = [environment.own_scenario(FRESH_SEED + i) for i in range(context.settings.evaluation.fresh)]
        sides = {}
        for side, adapter in (("base", None), ("adapter", name)):
            ids = play_owed(
                context,
                ground,
                [Episode("", t, context.settings.seed, 0, adapter) for t in fresh],
                what=f"{capability}: fresh seeds, {side}",
            )
            sides[side] = outcomes(context, ids)
        rates = {
            side: clustered_interval(f["success"].astype(float).to_numpy(), f["task"].to_numpy())
            for side, f in sides.items()
        }
        row = context.store.row("adapters", id=identity)
        assert row is not None
        record = AdapterRecord(
            capability,
            context.base.identity.base,
            context.base.identity.revision,
            round_id,
            {k: str(v) for k, v in row["config"].items()},
            {"environment": environment_id, "dtype": context.base.identity.dtype, FINGERPRINT: proof.text()},
        )
        folder = context.settings.folder / row["path"]
        registered = context.registry.register(record, folder, run)
        frame = sides["adapter"][["task", "family", "success", "reward"]]
        metrics = {
            "fresh/base_success": rates["base"].rate,
            "fresh/adapter_success": rates["adapter"].rate,
            "liveness": moved,
        }
        context.registry.log_evaluation(registered, frame, f"{capability}-fresh", metrics)
        context.registry.end_run(run)
        context.store.set_state(
            "adapters",
            identity,
            "registered",
            registered_model=registered.name,
            registered_version=str(registered.version),
            base_success=rates["base"].rate,
            adapter_success=rates["adapter"].rate,
            metrics={"liveness": moved, "adapter_low": rates["adapter"].low, "adapter_high": rates["adapter"].high},
        )
        create_link_artifact(
            key=f"adapter-{capability.replace('_', '-')}",
            link=context.registry.link(registered),
            link_text=registered.served_name,
            description=f"The adapter for {capability} in MLflow's registry",
        )
        return {"version": str(registered.version), "served_name": registered.served_name, **metrics}

    return context.stage(f"register:{capability}", work)
