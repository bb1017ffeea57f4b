"""Stage 7, last half, `trace-agent stage gate`: the assembled candidate against the live release as a whole; what is
proven becomes the live release (method, section 7; the rules are `tasks.measuring.gate_rules`)."""

from __future__ import annotations

from dataclasses import replace

from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from db import ReleaseRow, VerdictRow
from tasks.challenge import families_of, rules_of
from tasks.measuring.decisions import ReleaseDecision
from tasks.measuring.gate_rules import judge_release
from tasks.measuring.statistics import align
from tasks.releases.lifecycle import promote, refuse
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, EvaluateResult, GateResult, RouteResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage

WHOLE = "release"


@stage("gate", title="gate and promote")
def gate(context: Context) -> GateResult:
    """Decide on the candidate from the validation split; promote it, or refuse it with the reasons."""
    challenged, evaluated = context.result(ChallengeResult), context.result(EvaluateResult)
    if evaluated.skipped:
        return GateResult(skipped=evaluated.skipped, verdicts=challenged.verdicts)
    candidate = context.store.row(ReleaseRow, id=context.result(RouteResult).candidate)
    assert candidate is not None
    live = outcomes(context.store, [*evaluated.live_ids, *evaluated.further_live_ids])
    other = outcomes(context.store, [*evaluated.routed_ids, *evaluated.further_routed_ids])
    trials = context.settings.evaluation.validation_trials
    own = {c: families_of(context, c) for c in challenged.passed}
    pair = align(live, other)
    decision = judge_release(pair, rules_of(context), challenged.alpha, trials, own, challenged.look)
    verdict = str(decision.verdict)
    context.store.put(
        [
            VerdictRow(
                round_id=context.round.id,
                subject=WHOLE,
                verdict=verdict,
                points=decision.difference.points,
                p=decision.difference.p,
                mde=decision.mde,
                reasons=list(decision.reasons),
            )
        ],
        replace=True,
    )
    create_markdown_artifact(
        key="gate",
        description="The gate's verdict on the candidate release",
        markdown=f"**release {candidate.number}: {verdict}**\n\n" + "\n".join(f"- {r}" for r in decision.reasons),
    )
    context.store.put(
        [replace(candidate, evidence=_evidence(candidate, challenged, evaluated, decision))], replace=True
    )
    promoted = _apply(context, candidate, challenged, decision)
    return GateResult(
        promoted=challenged.passed if promoted else [],
        verdicts={**challenged.verdicts, WHOLE: verdict},
        release=candidate.number if promoted else 0,
    )


def _evidence(
    candidate: ReleaseRow, challenged: ChallengeResult, evaluated: EvaluateResult, decision: ReleaseDecision
) -> dict[str, object]:
    """What a release says of how it came to be."""
    rates = {name: getattr(evaluated, name) for name in ("base", "live", "routed", "noop")}
    return {
        **candidate.evidence,
        "validation": {name: rate.model_dump() for name, rate in rates.items() if rate is not None},
        "points": decision.difference.points,
        "p": decision.difference.p,
        "verdicts": challenged.verdicts,
        "look": challenged.look,
        "alpha": challenged.alpha,
        "plan": challenged.plan,
    }


def _apply(context: Context, candidate: ReleaseRow, challenged: ChallengeResult, decision: ReleaseDecision) -> bool:
    """Carry the verdict into store and registry; whether the candidate is live. Done again it changes nothing."""
    reason = " ".join(decision.reasons)
    if decision.promoted:
        promote(context.store, context.registry, candidate.id, reason)
        emit_event(
            "trace.release.promoted",
            resource={"prefect.resource.id": f"trace.release.{context.round.target}"},
            payload={"release": candidate.number, "capabilities": challenged.passed},
        )
        return True
    refuse(context.store, candidate.id, reason)
    return False
