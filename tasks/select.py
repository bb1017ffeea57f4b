"""Stage 3, `trace-agent stage select`: the capabilities that are covered and contrasted often enough (method,
section 3; the rule is `tasks.mining.selection`)."""

from __future__ import annotations

import pandas as pd
from prefect.artifacts import create_table_artifact

from db import CapabilityRow, LabelRow, SelectionRow, row_id
from tasks.mining.llm_analyst import LlmAnalyst, mining_settings
from tasks.mining.selection import select as select_by_rule
from tasks.round.context import Context
from tasks.round.results import ContrastResult, SelectResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.round.target_prompt import context_text
from tasks.synthesis.learning import generalist


@stage("select", title="select by coverage and contrast")
def select(context: Context) -> SelectResult:
    """Apply the rule to the stored labels; with a language model as analyst, its judges then leave out what no
    environment could train."""
    round_id = context.round.id
    rule = context.settings.selection
    stored = pd.DataFrame(context.store.rows(LabelRow, round_id=round_id))
    labelled = set() if stored.empty else set(stored["capability_id"])
    rows = context.store.rows(CapabilityRow, round_id=round_id)
    # The round's own generalist is no candidate; users' conversations that one answered have it as one.
    names = {r.id: r.name for r in rows if r.name != generalist.GENERALIST or r.id in labelled}
    if not names:
        return SelectResult(selected=generalist.with_generalist(context, [], rank=0))
    frame = outcomes(context.store, context.stored.diagnosis().trajectories).set_index("id")["success"]
    stored["capability"] = stored["capability_id"].map(names)
    stored["passed"] = stored["trajectory_id"].map(frame).astype(bool)
    chosen = select_by_rule(stored, rule.rho, rule.delta, rule.required, rule.runs)
    kappas = context.result(ContrastResult).kappa_by_capability
    unfit: dict[str, str] = {}
    if context.settings.analyst.kind == "llm":
        analyst = LlmAnalyst(
            context.analyst, context.stored, mining_settings(context.settings), context_text(context.target)
        )
        unfit = analyst.judge_fits(chosen, frame.to_dict())
    rank = {c.name: i for i, c in enumerate([c for c in chosen if c.selected])}
    context.store.put(
        [
            SelectionRow(
                round_id=round_id,
                capability_id=row_id(round_id, c.name),
                selected=c.selected,
                rank=rank.get(c.name),
                mean_cov=c.mean_cov,
                std_cov=c.std_cov,
                mean_delta=c.mean_delta,
                std_delta=c.std_delta,
                runs_passed=c.runs_passed,
                runs=rule.runs,
                kappa=kappas.get(c.name),
                evidence=[{"id": i, "votes": v} for i, v in c.evidence],
                reason=c.reason,
            )
            for c in chosen
        ],
    )
    agreed = {name: round(kappa, 2) for name, kappa in kappas.items() if kappa is not None}
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
                "kappa": agreed.get(c.name, ""),
                "reason": unfit.get(c.name, c.reason),
            }
            for c in chosen
        ],
    )
    selected = [c.name for c in chosen if c.selected and c.name not in unfit]
    return SelectResult(selected=generalist.with_generalist(context, selected, rank=len(rank)), unfit=unfit)
