"""Stage 4, `trace-agent stage calibrate`: what training would begin from plays the environment; only one that tells
rollouts apart may train (method, section 4, check 4)."""

from __future__ import annotations

import logging

from prefect.artifacts import create_markdown_artifact

from db import GENERALIST, CalibrationRow, EnvironmentRow, EnvironmentState, row_id
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.written import WrittenEnvironment
from tasks.measuring.lineup import load_member
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.round.results import CalibrateResult, SynthesizeResult
from tasks.round.rollouts import success_by_family
from tasks.round.stage import stage
from tasks.synthesis.calibration import FIGURES, is_mastered, measure
from tasks.synthesis.environments import stored_environment
from tasks.synthesis.learning.generalist import beginnings_of, calibrated_by_parts
from tasks.unattended.prefect_pages import show

logger = logging.getLogger("trace")


@stage("calibrate", title="calibrate {capability}")
def calibrate(context: Context, capability: str) -> CalibrateResult:
    """Have what the training begins from (`beginnings_of`) play `samples` episodes on each of `seeds` scenarios of the
    capability, and decide whether the environment may train. Where it may not from the first start, the next plays."""
    environment_id = context.result(SynthesizeResult, capability).environment
    if capability == GENERALIST:
        _judge(context, environment_id, True)
        return calibrated_by_parts(context)
    measured = context.store.row(CalibrationRow, id=row_id(environment_id, "calibration"))
    if measured is None:  # a written environment was calibrated before it was accepted
        environment = stored_environment(context.store, context.round, context.target, capability, context.keep)
        context.store.put([_measured(context, environment, environment_id, capability)])
        measured = context.store.row(CalibrationRow, id=row_id(environment_id, "calibration"))
    assert measured is not None
    accepted, reason = measured.accepted, measured.reason
    figures = {name: float(getattr(measured, name)) for name in FIGURES}
    _judge(context, environment_id, accepted)
    show(
        create_markdown_artifact,
        key=f"calibration-{capability.replace('_', '-')}",
        description=f"How the policy does in the environment made for {capability}",
        markdown=f"**{capability}**: {reason}\n\n" + "\n".join(f"- {k}: {v:.3f}" for k, v in figures.items()),
    )
    hinted = measured.detail.get("hinted")
    return CalibrateResult(
        accepted=accepted,
        reason=reason,
        mastered=figures["all_success"] == 1.0,
        hinted=hinted,
        level=measured.detail.get("level"),
        **figures,
    )


def pays_for(context: Context, capability: str) -> bool:
    """Whether a budget, where there is one, pays for calibrating what is made for a capability and for a step behind
    it, beside what proves the adapters that there are. What has begun goes on, whatever it has taken."""
    if context.budget is None or context.found(SynthesizeResult, capability) is not None:
        return True
    rule, train = context.settings.calibration, context.settings.train
    times = (2 if train.hints else 1) * len(beginnings_of(context, capability))
    needed = rule.seeds * rule.samples * times + train.groups * train.group_size
    paid = context.budget.for_training(adapter_id(context.round.id, capability))
    if paid < needed:
        logger.info("%s is not practised: it needs up to %d episodes, %d are left for it", capability, needed, paid)
    return paid >= needed


def _measured(
    context: Context, environment: ComposedEnvironment | WrittenEnvironment, environment_id: str, capability: str
) -> CalibrationRow:
    """The first calibration that may train or has mastered the environment, else that of the first start."""
    known = None
    if context.settings.train.focus:
        known = success_by_family(context.store, context.stored.diagnosis().trajectories)
    rows: list[CalibrationRow] = []
    for start in beginnings_of(context, capability):
        name = load_member(context, *start) if start else None
        found = measure(context.engine, context.settings, environment, name, context.round.number, known)
        rows.append(found.row(environment_id, start[1] if start else ""))
        if found.accepted or is_mastered(found.figures):
            return rows[-1]
    return rows[0]


def _judge(context: Context, environment_id: str, accepted: bool) -> None:
    """Store whether the environment may train. Done again it changes nothing."""
    stored = context.store.row(EnvironmentRow, id=environment_id)
    if stored is not None and stored.state == EnvironmentState.CHECKED:
        judged = EnvironmentState.ACCEPTED if accepted else EnvironmentState.REJECTED
        context.store.set_state(EnvironmentRow, environment_id, judged)
