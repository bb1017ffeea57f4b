"""Stage 1: roll the base out on the diagnosis split."""

from __future__ import annotations

from typing import Any

from prefect import task

from errors import EnvironmentFault
from tasks.round.context import current
from tasks.round.retries import RETRIES
from tasks.round.rollouts import diagnosis_ids, outcomes


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
