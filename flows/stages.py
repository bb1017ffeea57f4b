"""Flows that end after one stage: the same tasks in the same order, so that results can be looked at in between."""

from __future__ import annotations

from typing import Any

from prefect import flow

from db import RoundState
from flows.improve import ImproveParameters, code_version, prepare_all
from settings import load_settings
from tasks.calibrate import calibrate
from tasks.contrast import contrast
from tasks.evaluate import evaluate
from tasks.gate import gate_and_promote
from tasks.report import report
from tasks.rollout import rollout
from tasks.round.context import forget, open_context, peak_gib
from tasks.round.traffic import check_stage
from tasks.route import fit_router
from tasks.select import select_capabilities
from tasks.synthesize import synthesize
from tasks.train import train


@flow(name="stage", flow_run_name="{stage} of {params.target}")
def until(stage: str, params: ImproveParameters) -> dict[str, Any]:
    """Run the round up to and with `stage`; what is stored is not done again."""
    settings = load_settings(**params.model_dump(exclude={"fresh"}))
    check_stage(settings.target, stage)
    context = open_context(settings, params.fresh, code_version())
    round_id = context.round.id
    try:
        result = _until(stage, round_id)
        state, reason = (
            (RoundState.DONE, "") if stage == "report" else (RoundState.INTERRUPTED, f"stopped after {stage}, as asked")
        )
    except Exception as problem:
        state, reason = RoundState.INTERRUPTED, f"{type(problem).__name__}: {problem}"
        raise
    finally:
        context.store.finish_round(round_id, state, reason, peak_gib())
        forget(round_id)
    return {"round": round_id, **result}


def _until(stage: str, round_id: str) -> dict[str, Any]:
    result = rollout(round_id)
    if stage == "rollout":
        return result
    result = contrast(round_id)
    if stage == "contrast":
        return result
    result = select_capabilities(round_id)
    if stage == "select":
        return result
    selected = result["selected"]
    if stage in ("synthesize", "calibrate", "train"):
        return {capability: _one(stage, round_id, capability) for capability in selected}
    trained = prepare_all(round_id, selected)
    if stage == "register":
        return {"registered": trained}
    if trained:
        result = fit_router(round_id, trained)
        if stage == "route":
            return result
        evaluate(round_id, "validation", trained)
        result = gate_and_promote(round_id, trained)
        if stage == "gate":
            return result
        promoted = result["promoted"]
    else:
        promoted = []
    result = evaluate(round_id, "test", promoted)
    return result if stage == "evaluate" else report(round_id)


def _one(stage: str, round_id: str, capability: str) -> dict[str, Any]:
    """One capability up to `stage`."""
    result = synthesize(round_id, capability)
    if stage == "synthesize" or not result["accepted"]:
        return result
    environment = result["environment"]
    result = calibrate(round_id, capability, environment)
    if stage == "calibrate" or not result["accepted"]:
        return result
    return train(round_id, capability, environment)
