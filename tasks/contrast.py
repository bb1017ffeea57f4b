"""Stage 2: contrast successes with failures; candidate capabilities and their labels."""

from __future__ import annotations

from typing import Any

import pandas as pd
from prefect import task

from db import row_id
from tasks.mining.checks_analyst import bootstrap_labels, discover_candidates
from tasks.mining.llm_analyst import contrast_by_model
from tasks.round.context import current
from tasks.round.retries import RETRIES
from tasks.round.rollouts import diagnosis_ids, outcomes


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
