"""Stages 1 to 3: roll the base out on the diagnosis split, contrast successes with failures, select capabilities."""

from __future__ import annotations

from typing import Any

import pandas as pd
from prefect import task
from prefect.artifacts import create_table_artifact

from db import row_id
from errors import EnvironmentFault
from tasks.mining.llm_analyst import contrast_by_model, judge_fits
from tasks.mining.selection import bootstrap_labels, discover_candidates, select
from tasks.round.context import current, is_transient
from tasks.round.rollouts import base_ground, episodes_for, outcomes, play_owed
from tasks.round.traffic import TrafficTarget, import_conversations

RETRIES: dict[str, Any] = {"retries": 2, "retry_delay_seconds": [2, 10], "retry_condition_fn": is_transient}


def diagnosis_ids(round_id: str) -> list[str]:
    """Ids of the round's diagnosis trajectories; plays nothing that is stored."""
    context = current(round_id)
    if isinstance(context.target, TrafficTarget):  # played already, by users
        return import_conversations(context.store, context.round, context.target)
    episodes = episodes_for(context.tasks("diagnosis"), context.settings.rollout.trials, context.settings.seed)
    return play_owed(context, base_ground(context, "diagnosis"), episodes, what="rollout of diagnosis")


@task(name="rollout", task_run_name="rollout of the diagnosis split", **RETRIES)
def rollout(round_id: str) -> dict[str, Any]:
    """Play every diagnosis task with the base; returns counts."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        ids = diagnosis_ids(round_id)
        frame = outcomes(context, ids)
        errors = len(ids) - len(frame)
        if frame.empty:
            first = context.store.trajectory_frame(None, id=ids[:1])["error"].iloc[0]
            raise EnvironmentFault(f"all {len(ids)} diagnosis episodes were lost to errors; the first: {first}")
        return {"episodes": len(ids), "errors": errors, "success": float(frame["success"].mean())}

    return context.stage("rollout", work)


@task(name="contrast", task_run_name="contrast successes with failures", **RETRIES)
def contrast(round_id: str) -> dict[str, Any]:
    """Candidates and labels: from the verifier's checks, where N runs are bootstrap resamples, or by a model."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        frame, checks = _evidence(round_id)
        if context.settings.analyst.kind == "llm":
            return contrast_by_model(context, frame)
        candidates = discover_candidates(checks, frame)
        rows = [
            {
                "id": row_id(round_id, c.name),
                "round_id": round_id,
                "name": c.name,
                "definition": c.definition,
                "analyst": "checks",
                "examples": {"failed": list(c.failed_examples), "passed": list(c.passed_examples)},
            }
            for c in candidates
        ]
        context.store.put("capabilities", rows)
        labels = _labels(round_id, frame, checks)
        known = {c.name for c in candidates}
        labels = labels[labels["capability"].isin(known)]
        context.store.put(
            "labels",
            [
                {
                    "round_id": round_id,
                    "run": int(r.run),
                    "trajectory_id": r.trajectory_id,
                    "capability_id": row_id(round_id, r.capability),
                    "label": r.label,
                    "weight": int(r.weight),
                }
                for r in labels.itertuples()
            ],
        )
        return {"candidates": sorted(known), "labels": len(labels)}

    return context.stage("contrast", work)


def _evidence(round_id: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Outcomes [trajectory_id, task_id, passed] and checks of the diagnosis trajectories."""
    context = current(round_id)
    ids = diagnosis_ids(round_id)
    frame = outcomes(context, ids).rename(columns={"id": "trajectory_id", "task": "task_id", "success": "passed"})
    checks = context.store.check_frame(None, id=list(frame["trajectory_id"]))
    return frame, checks


def _labels(round_id: str, frame: pd.DataFrame, checks: pd.DataFrame) -> pd.DataFrame:
    context = current(round_id)
    return bootstrap_labels(checks, frame, context.settings.selection.runs, context.settings.seed)


@task(name="select", task_run_name="select by coverage and contrast", **RETRIES)
def select_capabilities(round_id: str) -> dict[str, Any]:
    """Cov, Delta and K of N; returns the selected names that an environment could train, in order."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        rule = context.settings.selection
        names = {r["id"]: r["name"] for r in context.store.rows("capabilities", round_id=round_id)}
        if not names:
            return {"selected": []}
        stored = pd.DataFrame(context.store.rows("labels", round_id=round_id))
        frame = outcomes(context, diagnosis_ids(round_id)).set_index("id")["success"]
        stored["capability"] = stored["capability_id"].map(names)
        stored["passed"] = stored["trajectory_id"].map(frame).astype(bool)
        chosen = select(stored, rule.rho, rule.delta, rule.required, rule.runs)
        kappas = (context.store.stage(round_id, "contrast").row().result or {}).get("kappa_by_capability", {})
        unfit = judge_fits(context, chosen, frame.to_dict()) if context.settings.analyst.kind == "llm" else {}
        rank = {c.name: i for i, c in enumerate([c for c in chosen if c.selected])}
        context.store.put(
            "selections",
            [
                {
                    "round_id": round_id,
                    "capability_id": row_id(round_id, c.name),
                    "selected": c.selected,
                    "rank": rank.get(c.name),
                    "mean_cov": c.mean_cov,
                    "std_cov": c.std_cov,
                    "mean_delta": c.mean_delta,
                    "std_delta": c.std_delta,
                    "runs_passed": c.runs_passed,
                    "runs": rule.runs,
                    "kappa": kappas.get(c.name),
                    "evidence": [{"id": i, "votes": v} for i, v in c.evidence[:20]],
                    "reason": c.reason,
                }
                for c in chosen
            ],
        )
        create_table_artifact(
            key="selection",
            description="Capabilities by coverage (Cov) and contrast (Delta)",
            table=[
                {
                    "capability": c.name,
                    "selected": c.selected,
                    "Cov": round(c.mean_cov, 3),
                    "Delta": round(c.mean_delta, 3),
                    "runs": f"{c.runs_passed}/{rule.runs}",
                    "kappa": "" if kappas.get(c.name) is None else round(kappas[c.name], 2),
                    "reason": unfit.get(c.name, c.reason),
                }
                for c in chosen
            ],
        )
        return {"selected": [c.name for c in chosen if c.selected and c.name not in unfit], "unfit": unfit}

    return context.stage("select", work)
