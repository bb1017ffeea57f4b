"""Stage 4, `trace-agent stage synthesize`: one training environment for a capability, composed from the target's
generators or written by a language model, and validated without a model (method, section 4, checks 1 to 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from db import GENERALIST, EnvironmentRow, EnvironmentState, row_id
from environments.contract import Generators, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.written import WrittenEnvironment
from environments.validation.checks import ValidationVerdict
from errors import EnvironmentFault, TargetError
from tasks.measuring.lineup import load_member
from tasks.round.context import Context
from tasks.round.results import CalibrateResult, SelectResult, SynthesizeResult, TrainResult
from tasks.round.rollouts import outcomes, success_by_family
from tasks.round.stage import stage
from tasks.synthesis.calibration import Calibration, limits_of, measure
from tasks.synthesis.environments import compose, families_of, validated
from tasks.synthesis.guarded import GuardedTarget
from tasks.synthesis.learning.generalist import beginning_of, compose_generalist, specialists
from tasks.synthesis.llm_synthesizer import EnvironmentWriter
from tasks.synthesis.starting import trainable_champion
from tasks.synthesis.transfer import transfer_verdict


@stage("synthesize", title="synthesize {capability}")
def synthesize(context: Context, capability: str) -> SynthesizeResult:
    """Compose the environment or have it written, validate it, and store it with its verdict."""
    if context.settings.synthesizer.kind == "llm":
        return _writer(context).write(capability)
    if not isinstance(context.target, Generators):
        reason = (
            f"target {context.round.target!r} has no generators to compose scenarios from; "
            "the llm synthesizer writes environments for such targets"
        )
        return SynthesizeResult(accepted=False, reasons=[reason])
    composed, reason = _composed(context, capability)
    if composed is not None:
        families = composed.spec.families
        if same := _same_training(context, capability, families):
            whose = f"those of {same!r}, whose training goes on from the same generalist"
            reason = f"its families ({', '.join(families)}) are {whose}"
            return SynthesizeResult(accepted=False, reasons=[reason], same_as=same)
        reason = _unprovable(context, families)
    if composed is None or reason:
        return SynthesizeResult(accepted=False, reasons=[reason])
    with context.environment:
        environment, verdict = validated(composed, limits_of(context.settings.calibration))
    return SynthesizeResult(
        accepted=verdict.accepted,
        reasons=list(verdict.reasons),
        environment=_stored(context, capability, environment.spec, verdict),
        versions=environment.spec.version,
    )


def _stored(context: Context, capability: str, spec: CompositionSpec, verdict: ValidationVerdict) -> str:
    """Id of the environment, which is stored with its verdict. Done again it changes nothing."""
    store, round_id = context.store, context.round.id
    identity = row_id(round_id, spec.id)
    row = EnvironmentRow(
        id=identity,
        round_id=round_id,
        capability_id=row_id(round_id, capability),
        version=spec.version,
        kind="generators",
        spec=asdict(spec),
        code_hash=spec.id,
        state=EnvironmentState.DRAFT,
        sandbox_level="none",
        verdicts=verdict.as_dict(),
    )
    store.put([row])
    stored = store.row(EnvironmentRow, id=identity)
    if stored is not None and stored.state == EnvironmentState.DRAFT:
        judged = EnvironmentState.CHECKED if verdict.accepted else EnvironmentState.REJECTED
        store.set_state(EnvironmentRow, identity, judged)
    return identity


def _composed(context: Context, capability: str) -> tuple[ComposedEnvironment | None, str]:
    """The capability's next environment from the target's generators, or why there is none."""
    try:
        return _composed_from(GuardedTarget(context.target), context, capability)
    except (EnvironmentFault, TargetError) as fault:
        return None, f"compose: {fault}"


def _composed_from(target: GuardedTarget, context: Context, capability: str) -> tuple[ComposedEnvironment | None, str]:
    round_id = context.round.id
    success = success_by_family(context.store, context.stored.diagnosis().trajectories)
    earlier = context.store.rows(EnvironmentRow, round_id=round_id, capability_id=row_id(round_id, capability))
    version = 1 + sum(row.state == EnvironmentState.WITHDRAWN for row in earlier)
    if capability == GENERALIST:
        return compose_generalist(context, target, success, version)
    if not any(capability in needs for needs in target.families().values()):
        return None, (
            f"no family of {context.round.target!r} is tagged with {capability!r}, so nothing can be composed for it"
        )
    share = context.settings.calibration.retention_share
    return compose(target, context.round, capability, success, share, version), ""


def _same_training(context: Context, capability: str, families: Sequence[str]) -> str:
    """The capability, selected before this one, whose environment is about the same families and whose training goes on
    from the same generalist: this one's would be that training once more. "" where there is none."""
    found = context.found(SelectResult)
    if capability == GENERALIST or found is None or capability not in found.selected:
        return ""
    for other in specialists(found.selected[: found.selected.index(capability)]):
        made = context.found(SynthesizeResult, other)
        if made is None or not made.goes_on or set(families_of(context, other)) != set(families):
            continue
        # A champion is its own capability's, and from the bare base nothing goes on.
        beginning = beginning_of(context, capability)
        if beginning is not None and beginning == beginning_of(context, other):
            return other
    return ""


def _unprovable(context: Context, families: Sequence[str]) -> str:
    """Why no challenge could prove what is trained on these families; "" where validation has, or may draw, a task."""
    if context.drawing.draws("validation") or any(task.family in families for task in context.tasks("validation")):
        return ""
    return (
        f"validation has no task of its families ({', '.join(families)}), so nothing could prove what is trained for "
        "it; give the target some, or raise rollout.tasks where it leaves them out"
    )


def _writer(context: Context) -> EnvironmentWriter:
    """What has environments written; the base is loaded when the first one is calibrated."""

    def calibrate(environment: WrittenEnvironment) -> Calibration:
        champion = trainable_champion(context, environment.spec.capability)
        name = load_member(context, environment.spec.capability, champion) if champion else None
        return measure(context.engine, context.settings, environment, name, context.round.number)

    def held_out() -> list[TargetTask]:
        # Also those that a small profile does not play: another round may.
        return [*context.drawing.whole("validation"), *context.drawing.whole("test")]

    return EnvironmentWriter(context.author, context.stored, context.target, context.settings, calibrate, held_out)


def withdraw(context: Context, capability: str, reason: str) -> bool:
    """Take back the environment that a capability was trained on, so that its stages are owed again; whether another
    version may be made (`synthesizer.versions`). What does not carry over is told to its author, with episodes; an
    environment that was composed has none, and would be composed alike."""
    store, at = context.store, context.round
    rows = store.rows(EnvironmentRow, round_id=at.id, capability_id=row_id(at.id, capability))
    trained = context.found(TrainResult, capability)
    checked = trained.transfer if trained else None
    told: dict[str, Any] = {}
    if checked is not None and checked.verdict:
        sides = {"practised": outcomes(store, checked.practised), "tried": outcomes(store, checked.tried)}
        told = {"transfer": transfer_verdict(store, checked, sides)}
    for row in rows:
        if row.state == EnvironmentState.ACCEPTED:
            verdicts = {**row.verdicts, "withdrawn": reason, **told}
            store.set_state(EnvironmentRow, row.id, EnvironmentState.WITHDRAWN, verdicts=verdicts)
    if told and not any(row.kind == "llm" for row in rows):
        return False
    if len(rows) >= context.settings.synthesizer.versions:
        return False
    store.reopen_stages(
        at.id, [f"{kind.stage}:{capability}" for kind in (SynthesizeResult, CalibrateResult, TrainResult)]
    )
    return True
