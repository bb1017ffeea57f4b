"""Stage 5, `trace-agent stage register`: a trained adapter is proven live, measured on fresh seeds, and becomes a
version in MLflow's registry."""

from __future__ import annotations

from dataclasses import replace

from prefect.artifacts import create_link_artifact

from db import AdapterRow, AdapterState
from errors import EpisodesLost
from models.adapters.files import AdapterRecord
from models.adapters.fingerprint import TAG as FINGERPRINT
from models.adapters.fingerprint import Fingerprint
from models.adapters.loading import fingerprint_on
from models.episodes import Episode
from tasks.measuring.lineup import champion_of, load_member
from tasks.measuring.statistics import clustered_interval
from tasks.round.adapters import kept_proof, load_trained, own_adapter
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.results import RegisterResult, SynthesizeResult, TrainResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.synthesis.calibration import FRESH_SEED, seed_offset
from tasks.synthesis.environments import stored_environment


@stage("register", title="register {capability}")
def register(context: Context, capability: str) -> RegisterResult:
    """Load the adapter, measure it on fresh seeds against the base and the champion that it was trained on from, and
    register it in MLflow as challenger, with the proof of its training's end."""
    environment_id = context.result(SynthesizeResult, capability).environment
    run = context.result(TrainResult, capability).run
    identity = own_adapter(context.stored, capability)
    environment = stored_environment(context.store, context.round, context.target, capability, context.keep)
    name = load_trained(context.stored, context.policy, context.files, capability)
    row = context.store.row(AdapterRow, id=identity)
    assert row is not None
    proof = proof_of(context, row, name)
    moved = proof.largest_move
    ground = context.training_ground(environment.spec.id, environment.environment, identity)
    first = FRESH_SEED + seed_offset(context.round.number)
    fresh = [environment.own_scenario(first + i) for i in range(context.settings.evaluation.fresh)]
    champion = champion_of(context, capability)
    playing: dict[str, tuple[str | None, Playground]] = {
        "base": (None, ground),
        **(
            {"champion": (load_member(context, capability, champion), replace(ground, adapter_id=champion))}
            if champion
            else {}
        ),
        "adapter": (name, ground),
    }
    sides = {}
    for side, (adapter, on) in playing.items():
        ids = context.engine.play(
            on,
            [Episode("", t, context.seed, 0, adapter) for t in fresh],
            f"{capability}: fresh seeds, {side}",
        )
        sides[side] = outcomes(context.store, ids)
        if sides[side].empty:
            raise EpisodesLost(
                f"all {len(ids)} episodes of {side} on fresh seeds of {capability} were lost to errors, so it has no "
                "rate; mend what they were lost to (docs/2-database.md, question 3), then run the same command"
            )
    rates = {
        side: clustered_interval(f["success"].astype(float).to_numpy(), f["task"].to_numpy())
        for side, f in sides.items()
    }
    record = AdapterRecord(
        capability,
        context.base.identity.base,
        context.base.identity.revision,
        context.round.id,
        {k: str(v) for k, v in row.config.items()},
        {"environment": environment_id, "dtype": context.base.identity.dtype, FINGERPRINT: proof.text()},
    )
    folder = context.files.fetch(row.path)
    registered = context.registry.register(record, folder, run)
    frame = sides["adapter"][["task", "family", "success", "reward"]]
    metrics = {
        **{f"fresh/{side}_success": rate.rate for side, rate in rates.items()},
        "liveness": moved,
    }
    context.registry.log_evaluation(registered, frame, f"{capability}-fresh", metrics)
    context.registry.end_run(run)
    context.store.set_state(
        AdapterRow,
        identity,
        AdapterState.REGISTERED,
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
    return RegisterResult(
        version=str(registered.version),
        served_name=registered.served_name,
        base_success=rates["base"].rate,
        champion_success=rates["champion"].rate if "champion" in rates else None,
        adapter_success=rates["adapter"].rate,
        liveness=moved,
    )


def proof_of(context: Context, adapter: AdapterRow, name: str) -> Fingerprint:
    """How the adapter, which is loaded under this name, is recognised: as it was found when its training ended, or
    taken now where these weights were not probed then (by an earlier version)."""
    if (kept := kept_proof(adapter)) is not None:
        return kept
    with context.model:
        return fingerprint_on(context.policy, context.probe, name)
