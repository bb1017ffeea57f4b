"""Stage 5, `trace-agent stage register`: a trained adapter is proven live, measured on fresh seeds, and becomes a
version in MLflow's registry."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd
from prefect.artifacts import create_link_artifact

from db import AdapterRow, AdapterState
from environments.sandbox.workers import ModuleError
from errors import EpisodesLost
from models.adapters.files import AdapterRecord, RegisteredAdapter
from models.adapters.fingerprint import TAG as FINGERPRINT
from models.adapters.fingerprint import Fingerprint
from models.adapters.loading import fingerprint_on
from models.episodes import Episode
from tasks.measuring.lineup import champion_of, load_member
from tasks.measuring.statistics import Interval, success_interval
from tasks.round.adapters import kept_proof, load_trained, own_adapter
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.results import RegisterResult, SynthesizeResult, TrainResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.synthesis.bank import MODULE_AT_FAULT
from tasks.synthesis.calibration import FRESH_SEED, seed_offset
from tasks.synthesis.choosing import finished
from tasks.synthesis.environments import stored_environment
from tasks.train import FAILED
from tasks.unattended.prefect_pages import show

logger = logging.getLogger("trace")


@stage("register", title="register {capability}")
def register(context: Context, capability: str) -> RegisterResult:
    """Load the adapter, measure it on fresh seeds against the base and the champion that it was trained on from, and
    register it in MLflow as challenger, with the proof of its training's end. One whose written module gives no
    scenarios any more, or loses every episode of a side, cannot be measured: it ends alone, and the round goes on."""
    row = context.store.row(AdapterRow, id=own_adapter(context.stored, capability))
    assert row is not None, "it was trained"
    if row.state == AdapterState.FAILED:  # a process died between that and the end of the stage
        return RegisterResult(skipped=f"{FAILED}: {row.config[FAILED]}")
    name = load_trained(context.stored, context.policy, context.files, capability)
    proof = proof_of(context, row, name)
    try:
        sides = _on_fresh_seeds(context, capability, row.id, name)
    except ModuleError as problem:
        logger.warning("the adapter for %s is not registered: %s", capability, problem)
        config = {**row.config, FAILED: str(problem), MODULE_AT_FAULT: True}
        context.store.set_state(AdapterRow, row.id, AdapterState.FAILED, config=config)
        return RegisterResult(skipped=f"{FAILED}: {problem}")
    rates = {side: success_interval(f) for side, f in sides.items()}
    registered = _in_mlflow(context, capability, row, proof, sides["adapter"], rates)
    liveness, adapter = proof.largest_move, rates["adapter"]
    context.store.set_state(
        AdapterRow,
        row.id,
        AdapterState.REGISTERED,
        registered_model=registered.name,
        registered_version=str(registered.version),
        base_success=rates["base"].rate,
        adapter_success=adapter.rate,
        metrics={"liveness": liveness, "adapter_low": adapter.low, "adapter_high": adapter.high},
    )
    show(
        create_link_artifact,
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
        adapter_success=adapter.rate,
        liveness=liveness,
    )


def _on_fresh_seeds(context: Context, capability: str, identity: str, name: str) -> dict[str, pd.DataFrame]:
    """Outcomes of the base, the champion if there is one, and the adapter, which is loaded under `name`, on scenarios
    that no training has seen. Raises `ModuleError` where a written module has lost every episode of a side, and
    `EpisodesLost` where they were lost to anything else."""
    environment = stored_environment(context.store, context.round, context.target, capability, context.keep)
    ground = context.training_ground(environment.spec.id, environment.environment, identity)
    first = FRESH_SEED + seed_offset(context.round.number)
    scenarios = [environment.own_scenario(first + i) for i in range(context.settings.evaluation.fresh)]
    playing: dict[str, tuple[str | None, Playground]] = {"base": (None, ground)}
    if champion := champion_of(context, capability):
        loaded = load_member(context, capability, champion)
        playing["champion"] = loaded, replace(ground, adapter_id=champion)
    playing["adapter"] = name, ground
    sides = {}
    for side, (adapter, on) in playing.items():
        episodes = [Episode("", scenario, context.seed, 0, adapter) for scenario in scenarios]
        ids = context.engine.play(on, episodes, f"{capability}: fresh seeds, {side}")
        frame = outcomes(context.store, ids, lost=True)
        sides[side] = finished(frame, {s.id for s in scenarios}, f"what {side} does on fresh seeds")
        if sides[side].empty:
            raise EpisodesLost(
                f"all {len(ids)} episodes of {side} on fresh seeds of {capability} were lost to errors, so it has no "
                "rate; mend what they were lost to (docs/2-database.md, question 3), then run the same command"
            )
    return sides


def _in_mlflow(
    context: Context,
    capability: str,
    row: AdapterRow,
    proof: Fingerprint,
    fresh: pd.DataFrame,
    rates: Mapping[str, Interval],
) -> RegisteredAdapter:
    """The adapter's version in MLflow's registry, with what it did on fresh seeds; the run of its training ends."""
    base = context.base.identity
    record = AdapterRecord(
        capability,
        base.base,
        base.revision,
        context.round.id,
        {k: str(v) for k, v in row.config.items()},
        {
            "environment": context.result(SynthesizeResult, capability).environment,
            "dtype": base.dtype,
            FINGERPRINT: proof.text(),
        },
    )
    run = context.result(TrainResult, capability).run
    registered = context.registry.register(record, context.files.fetch(row.path), run)
    metrics = {f"fresh/{side}_success": rate.rate for side, rate in rates.items()} | {"liveness": proof.largest_move}
    shown = fresh[["task", "family", "success", "reward"]]
    context.registry.log_evaluation(registered, shown, f"{capability}-fresh", metrics)
    context.registry.end_run(run)
    return registered


def proof_of(context: Context, adapter: AdapterRow, name: str) -> Fingerprint:
    """How the adapter, which is loaded under this name, is recognised: as it was found when its training ended, or
    taken now where these weights were not probed then (by an earlier version)."""
    if (kept := kept_proof(adapter)) is not None:
        return kept
    with context.model:
        return fingerprint_on(context.policy, context.probe, name)
