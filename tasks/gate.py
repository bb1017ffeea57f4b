"""Stage 7, last half, `trace-agent stage gate`: the assembled candidate against the live release as a whole; what is
proven becomes the live release, unless a person who was asked declines it (method, section 7; the rules are
`tasks.measuring.gate_rules`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect.artifacts import create_markdown_artifact

from db import ReleaseRow, VerdictRow
from tasks.evaluate import decision_on
from tasks.measuring.decisions import GateVerdict, ReleaseDecision
from tasks.measuring.gate_plan import p_text
from tasks.operations.told import tell_verdict
from tasks.releases.lifecycle import add_evidence, promote, refuse
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, EvaluateResult, GateResult, RouteResult
from tasks.round.stage import stage

WHOLE = "release"


@dataclass(frozen=True)
class Proposal:
    """The candidate of a round, and what the gate says of it; `superseded` is the one that it replaced (its id)."""

    candidate: ReleaseRow
    challenged: ChallengeResult
    evaluated: EvaluateResult
    decision: ReleaseDecision
    superseded: str = ""

    def table(self) -> str:
        """The verdict in Markdown: reasons, the split's difference, and each family's, with its further tasks."""
        d = self.decision
        rows = {"the split": d.difference, **{f"own: {c}": v for c, v in d.capabilities.items()}, **d.families}
        lines = [f"**release {self.candidate.number}: {d.verdict}**", ""]
        lines += [f"- {reason}" for reason in d.reasons]
        lines += ["", "| | points | 95 % interval | tasks | p |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {v.points:+.1f} | {v.low:+.1f} to {v.high:+.1f} | {v.tasks} | {p_text(v.p, 4)} |"
            for name, v in rows.items()
        ]
        return "\n".join(lines)


def proposal_of(context: Context) -> Proposal | None:
    """What the gate will say, from the episodes that are stored; None where there is no candidate."""
    challenged, evaluated = context.result(ChallengeResult), context.result(EvaluateResult)
    if evaluated.skipped:
        return None
    routed = context.result(RouteResult)
    candidate = context.store.row(ReleaseRow, id=evaluated.candidate or routed.candidate)
    assert candidate is not None
    decision = decision_on(context, evaluated)
    superseded = routed.candidate if evaluated.candidate else ""
    return Proposal(candidate, challenged, evaluated, decision, superseded)


@stage("gate", title="gate and promote")
def gate(context: Context) -> GateResult:
    """Decide on the candidate from the validation split; promote it, or refuse it with the reasons."""
    proposal = proposal_of(context)
    if proposal is None:
        skipped, verdicts = context.result(EvaluateResult).skipped, context.result(ChallengeResult).verdicts
        tell_verdict(context, 0, verdicts, skipped)
        return GateResult(skipped=skipped, verdicts=verdicts)
    candidate, challenged, decision = proposal.candidate, proposal.challenged, proposal.decision
    if decision.promoted and context.declined:
        reasons = (*decision.reasons, f"A person declined it: {context.declined}.")
        decision = replace(decision, verdict=GateVerdict.DECLINED, reasons=reasons)
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
        markdown=replace(proposal, decision=decision).table(),
    )
    add_evidence(context.store, candidate.id, _evidence(challenged, proposal.evaluated, decision))
    promoted = _apply(context, candidate, decision)
    if proposal.superseded:
        reason = f"its router was fitted again: release {candidate.number} has the verdict"
        refuse(context.store, proposal.superseded, reason)
    verdicts = {**challenged.verdicts, WHOLE: verdict}
    tell_verdict(context, candidate.number, verdicts, " ".join(decision.reasons))
    return GateResult(
        promoted=challenged.passed if promoted else [],
        verdicts=verdicts,
        release=candidate.number if promoted else 0,
    )


def _evidence(challenged: ChallengeResult, evaluated: EvaluateResult, decision: ReleaseDecision) -> dict[str, object]:
    """What the gate adds to what a release says of how it came to be."""
    rates = {name: getattr(evaluated, name) for name in ("base", "live", "routed", "noop")}
    return {
        "validation": {name: rate.model_dump() for name, rate in rates.items() if rate is not None},
        "points": decision.difference.points,
        "p": decision.difference.p,
        "verdicts": challenged.verdicts,
        "look": challenged.look,
        "alpha": challenged.alpha,
        "plan": challenged.plan,
    }


def _apply(context: Context, candidate: ReleaseRow, decision: ReleaseDecision) -> bool:
    """Carry the verdict into store and registry; whether the candidate is live. Done again it changes nothing."""
    reason = " ".join(decision.reasons)
    if decision.promoted:
        promote(context.store, context.registry, candidate.id, reason)
        return True
    refuse(context.store, candidate.id, reason)
    return False
