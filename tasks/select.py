"""Stage 3, `trace-agent stage select`: the capabilities that are covered and contrasted often enough (method,
section 3; the rule is `tasks.mining.selection`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from prefect.artifacts import create_table_artifact

from db import CapabilityRow, LabelRow, SelectionRow, row_id
from tasks.mining.llm_analyst import LlmAnalyst
from tasks.mining.selection import CapabilitySelection
from tasks.mining.selection import select as select_by_rule
from tasks.round.context import Context
from tasks.round.results import ContrastResult, SelectResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.synthesis.learning.generalist import GENERALIST, with_generalist
from tasks.unattended.prefect_pages import show


@stage("select", title="select by coverage and contrast")
def select(context: Context) -> SelectResult:
    """Apply the rule to the stored labels; with a language model as analyst, its judges then leave out what no
    environment could train."""
    labels = _labels(context)
    if labels is None:
        return SelectResult(selected=with_generalist(context, [], rank=0))
    passed = outcomes(context.store, context.stored.diagnosis().trajectories).set_index("id")["success"]
    labels["passed"] = labels["trajectory_id"].map(passed).astype(bool)
    rule = context.settings.selection
    chosen = select_by_rule(labels, rule.rho, rule.delta, rule.required, rule.runs)
    unfit: dict[str, str] = {}
    if context.settings.analyst.kind == "llm":
        unfit = LlmAnalyst.of(context).judge_fits(chosen, passed.to_dict())
    kappas = context.result(ContrastResult).kappa_by_capability
    _store(context, chosen, kappas)
    _show(chosen, kappas, unfit, rule.runs)
    by_rule = [c.name for c in chosen if c.selected]
    selected = [name for name in by_rule if name not in unfit]
    return SelectResult(selected=with_generalist(context, selected, rank=len(by_rule)), unfit=unfit)


def _labels(context: Context) -> pd.DataFrame | None:
    """The round's stored labels, with the capabilities' names; None where there is no candidate."""
    labels = pd.DataFrame(context.store.rows(LabelRow, round_id=context.round.id))
    labelled = set() if labels.empty else set(labels["capability_id"])
    candidates = context.store.rows(CapabilityRow, round_id=context.round.id)
    # The round's own generalist is no candidate; users' conversations that one answered have it as one.
    names = {c.id: c.name for c in candidates if c.name != GENERALIST or c.id in labelled}
    if not names:
        return None
    return labels.assign(capability=labels["capability_id"].map(names))


def _store(context: Context, chosen: Sequence[CapabilitySelection], kappas: Mapping[str, float | None]) -> None:
    """Keep what the rule found of every candidate."""
    round_id, runs = context.round.id, context.settings.selection.runs
    rank = {name: i for i, name in enumerate(c.name for c in chosen if c.selected)}
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
                runs=runs,
                kappa=kappas.get(c.name),
                evidence=[{"id": i, "votes": v} for i, v in c.evidence],
                reason=c.reason,
            )
            for c in chosen
        ]
    )


def _show(
    chosen: Sequence[CapabilitySelection], kappas: Mapping[str, float | None], unfit: Mapping[str, str], runs: int
) -> None:
    """The selection as a table in Prefect's UI."""
    agreed = {name: round(kappa, 2) for name, kappa in kappas.items() if kappa is not None}
    show(
        create_table_artifact,
        key="selection",
        description="Capabilities by coverage (Cov) and contrast (Delta)",
        table=[
            {
                "capability": c.name,
                "selected": c.selected,
                "Cov": round(c.mean_cov, 3),
                "Delta": round(c.mean_delta, 3),
                "runs": f"{c.runs_passed}/{runs}",
                "kappa": agreed.get(c.name, ""),
                "reason": unfit.get(c.name, c.reason),
            }
            for c in chosen
        ],
    )
