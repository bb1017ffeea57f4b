"""Stage 7, last half, `trace-agent stage gate`: the assembled candidate against the live release as a whole; what is
proven becomes the live release, unless a person declines it, or has changed meanwhile what is live (method, section 7;
the rules are `tasks.measuring.gate_rules`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect.artifacts import create_markdown_artifact

from db import ReleaseRow, ReleaseState, VerdictRow
from errors import ConfigurationError, TransitionError
from tasks.gating.judging import decision_on
from tasks.measuring.decisions import GateVerdict, ReleaseDecision
from tasks.measuring.gate_plan import p_text
from tasks.operations.announcements import tell_verdict
from tasks.releases.lifecycle import add_evidence, promote, refuse
from tasks.releases.lookup import JUDGED, stored_release
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, EvaluateResult, GateResult, RouteResult
from tasks.round.stage import stage
from tasks.unattended.prefect_pages import show

WHOLE = "release"


@dataclass(frozen=True)
class Proposal:
    """The candidate of a round, and what the gate says of it."""

    candidate: ReleaseRow
    challenged: ChallengeResult
    evaluated: EvaluateResult
    decision: ReleaseDecision

    def table(self) -> str:
        """The verdict in Markdown: reasons, the split's difference, and each family's, with its further tasks."""
        d = self.decision
        whole = [] if d.difference is None else [("the split", d.difference)]
        rows = [*whole, *((f"own: {c}", v) for c, v in d.capabilities.items()), *d.families.items()]
        lines = [f"**release {self.candidate.number}: {d.verdict}**", ""]
        lines += [f"- {reason}" for reason in d.reasons]
        lines += ["", "| | points | 95 % interval | tasks | p |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {v.points:+.1f} | {v.low:+.1f} to {v.high:+.1f} | {v.tasks} | {p_text(v.p, 4)} |"
            for name, v in rows
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
    return Proposal(candidate, challenged, evaluated, decision)


@stage("gate", title="gate and promote")
def gate(context: Context) -> GateResult:
    """Decide on the candidate from the validation split; promote it, or refuse it with the reasons."""
    proposal = proposal_of(context)
    if proposal is None:
        skipped, verdicts = context.result(EvaluateResult).skipped, context.result(ChallengeResult).verdicts
        tell_verdict(context, 0, verdicts, skipped)
        return GateResult(skipped=skipped, verdicts=verdicts)
    candidate, challenged, decision = proposal.candidate, proposal.challenged, proposal.decision
    add_evidence(context.store, candidate.id, _evidence(challenged, proposal.evaluated, decision))
    decision = _apply(context, candidate, decision)
    verdict = str(decision.verdict)
    context.store.put(
        [
            VerdictRow(
                round_id=context.round.id,
                subject=WHOLE,
                verdict=verdict,
                points=decision.difference.points if decision.difference else None,
                p=decision.difference.p if decision.difference else None,
                mde=decision.mde,
                reasons=list(decision.reasons),
            )
        ],
        replace=True,
    )
    _refuse_others(context, candidate)
    verdicts = {**challenged.verdicts, WHOLE: verdict}
    tell_verdict(context, candidate.number, verdicts, " ".join(decision.reasons))
    show(
        create_markdown_artifact,
        key="gate",
        description="The gate's verdict on the candidate release",
        markdown=replace(proposal, decision=decision).table(),
    )
    return GateResult(
        promoted=challenged.passed if decision.promoted else [],
        verdicts=verdicts,
        release=candidate.number if decision.promoted else 0,
    )


def _evidence(challenged: ChallengeResult, evaluated: EvaluateResult, decision: ReleaseDecision) -> dict[str, object]:
    """What the gate adds to what a release says of how it came to be."""
    return {
        "validation": {name: rate.model_dump() for name, rate in evaluated.rates().items() if rate is not None},
        "points": decision.difference.points if decision.difference else None,
        "p": decision.difference.p if decision.difference else None,
        JUDGED: challenged.verdicts,
        "look": challenged.look,
        "alpha": challenged.alpha,
        "plan": challenged.plan,
    }


def _refuse_others(context: Context, judged: ReleaseRow) -> None:
    """Refuse what the round assembled besides the candidate that was judged: the first one, where its router was fitted
    again, and what an attempt of `evaluate` that was broken off had fitted."""
    for other in context.store.rows(ReleaseRow, round_id=context.round.id, state=ReleaseState.CANDIDATE):
        if other.id != judged.id:
            why = "its router was fitted again" if other.number < judged.number else "it was not evaluated to the end"
            refuse(context.store, other.id, f"{why}: release {judged.number} has the verdict")


def _apply(context: Context, candidate: ReleaseRow, decision: ReleaseDecision) -> ReleaseDecision:
    """Carry the decision into store and registry, and give what came of it: a person may not want what the rules
    promote, or have changed meanwhile what is live. Done again it changes nothing, and gives the same."""
    now = stored_release(context.store, candidate.id)
    if now.state == ReleaseState.REFUSED:
        decision = _as_refused(context, now, decision)
    elif decision.promoted and context.declined:
        decision = _declined(decision, f"A person declined it: {context.declined}.")
    if decision.promoted:
        try:
            promote(context.store, context.registry, candidate.id, " ".join(decision.reasons))
            return decision
        except (ConfigurationError, TransitionError) as problem:
            now = stored_release(context.store, candidate.id)
            if now.state == ReleaseState.LIVE:
                raise  # it is MLflow that does not follow
            decision = _declined(decision, f"It was not made live: {problem}")
    if now.state in (ReleaseState.CANDIDATE, ReleaseState.REFUSED):  # else it was live, and a person left it
        refuse(context.store, candidate.id, " ".join(decision.reasons))
    return decision


def _declined(decision: ReleaseDecision, reason: str) -> ReleaseDecision:
    return replace(decision, verdict=GateVerdict.DECLINED, reasons=(*decision.reasons, reason))


def _as_refused(context: Context, refused: ReleaseRow, decision: ReleaseDecision) -> ReleaseDecision:
    """What a candidate was refused with by a process that died then: a person's word was in its memory alone."""
    stored = context.store.row(VerdictRow, round_id=context.round.id, subject=WHOLE)
    if stored is not None and stored.verdict != GateVerdict.PROMOTED:
        return replace(decision, verdict=GateVerdict(stored.verdict), reasons=tuple(stored.reasons))
    if not decision.promoted:
        return decision
    return replace(decision, verdict=GateVerdict.DECLINED, reasons=(refused.reason or "It was refused before.",))
