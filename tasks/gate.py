"""Stage 7, `trace-agent stage gate`: what is proven better is promoted (method, section 7; the rules are
`tasks.measuring.gate_rules`)."""

from __future__ import annotations

import pandas as pd
from prefect.artifacts import create_table_artifact
from prefect.events import emit_event

from db import AdapterRow, AdapterState, RouteRow, VerdictRow, row_id
from models.adapters.releases import set_champion
from tasks.measuring.gate_rules import GateRules
from tasks.measuring.gate_rules import gate as gate_by_rules
from tasks.measuring.statistics import align
from tasks.round.adapters import adapter_id, registered
from tasks.round.context import Context
from tasks.round.results import EvaluateResult, GateResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.synthesis.environments import stored_environment


@stage("gate", title="gate and promote")
def gate(context: Context) -> GateResult:
    """Decide on all adapters at once from the validation split; move the alias `champion` to what is proven."""
    round_id, evaluated = context.round.id, context.result(EvaluateResult)
    if evaluated.skipped:
        return GateResult(skipped=evaluated.skipped)
    base = outcomes(context.store, evaluated.base_ids)
    routed = outcomes(context.store, evaluated.routed_ids)
    chosen = {r.trajectory_id: r.capability for r in context.store.rows(RouteRow, trajectory_id=evaluated.routed_ids)}
    by_task = {r.task: chosen.get(r.id, "") for r in routed.itertuples()}
    pairs, own = {}, {}
    for capability in registered(context.stored):
        mine = routed["task"].map(by_task) == capability
        other = pd.concat([routed[mine], base[~base["task"].isin(routed[mine]["task"])]])
        pairs[capability] = align(base, other)
        own[capability] = stored_environment(
            context.store, context.round, context.target, capability, context.keep
        ).spec.families
    s = context.settings.evaluation
    decisions = gate_by_rules(pairs, own, GateRules(alpha=s.alpha, margin=s.margin)) if pairs else {}
    promoted = []
    for capability, decision in decisions.items():
        context.store.put(
            [
                VerdictRow(
                    round_id=round_id,
                    subject=capability,
                    capability_id=row_id(round_id, capability),
                    verdict=str(decision.verdict),
                    points=decision.difference.points,
                    p=decision.difference.p,
                    p_holm=decision.adjusted_p,
                    mde=decision.mde,
                    reasons=list(decision.reasons),
                )
            ],
            replace=True,
        )
        _apply(context, capability, str(decision.verdict), decision.promoted)
        if decision.promoted:
            promoted.append(capability)
    create_table_artifact(
        key="gate",
        description="Verdicts of the gate on the validation split",
        table=[
            {
                "capability": c,
                "verdict": str(d.verdict),
                "points": round(d.difference.points, 1),
                "p (Holm)": round(d.adjusted_p, 4),
                "reasons": " ".join(d.reasons),
            }
            for c, d in decisions.items()
        ],
    )
    return GateResult(promoted=promoted, verdicts={c: str(d.verdict) for c, d in decisions.items()})


def _apply(context: Context, capability: str, verdict: str, promoted: bool) -> None:
    """Carry a verdict into store and registry. Done again it changes nothing."""
    identity = adapter_id(context.round.id, capability)
    row = context.store.row(AdapterRow, id=identity)
    assert row is not None
    assert row.registered_version is not None, "only registered adapters are gated"
    version = row.registered_version
    context.registry.set_gate(capability, version, verdict)
    if promoted:
        champion = context.registry.champion(capability)
        if champion is None or str(champion.version) != version:
            set_champion(context.registry, context.registry.model_name(capability), version)
        for other in context.store.rows(AdapterRow, registered_model=row.registered_model, state=AdapterState.CHAMPION):
            if other.id != identity:
                context.store.set_state(AdapterRow, other.id, AdapterState.RETIRED)
        emit_event(
            "trace.adapter.promoted",
            resource={"prefect.resource.id": f"trace.adapter.{capability}"},
            payload={"version": version},
        )
    if row.state == AdapterState.REGISTERED:
        context.store.set_state(AdapterRow, identity, AdapterState.CHAMPION if promoted else AdapterState.REJECTED)
