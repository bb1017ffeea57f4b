"""Stage 3: select the capabilities that are covered and contrasted often enough."""

from __future__ import annotations

from typing import Any

import pandas as pd
from prefect import task
from prefect.artifacts import create_table_artifact

from db import row_id
from tasks.mining.llm_analyst import judge_fits
from tasks.mining.selection import select
from tasks.round.context import current
from tasks.round.retries import RETRIES
from tasks.round.rollouts import diagnosis_ids, outcomes


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
