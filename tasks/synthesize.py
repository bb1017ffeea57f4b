"""Stage 4: one training environment per capability, composed from the target's generators or written by a model;
validated without a model, calibrated with the base."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact

from db import row_id
from environments.contract import Generators
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.written import WrittenEnvironment
from environments.validation.checks import validate_environment
from tasks.mine import RETRIES, diagnosis_ids
from tasks.round.context import Context, current
from tasks.round.rollouts import outcomes
from tasks.synthesis.calibration import FIGURES, limits_of, measure
from tasks.synthesis.llm_synthesizer import accepted_environment, write_environment

# Success of the base from which a family counts as mastered: nothing to train there, much to forget.
MASTERED = 0.5


def compose(context: Context, capability: str, version: int = 1) -> ComposedEnvironment:
    """The environment of a capability.

    Its families need the capability, are not mastered, and otherwise need only what the base has shown; retention
    families are all others in which the base has any success. A family is never in both.
    """
    generators = context.target
    assert isinstance(generators, Generators)
    frame = outcomes(context, diagnosis_ids(context.round.id))
    success = frame.groupby("family")["success"].mean().to_dict()
    families = generators.families()
    shown = {c for name, needs in families.items() if success.get(name, 0.0) >= MASTERED for c in needs}
    needing = sorted(n for n, needs in families.items() if capability in needs and success.get(n, 0.0) < MASTERED)
    alone = [n for n in needing if set(families[n]) - {capability} <= shown]
    own = tuple(alone or needing or sorted(n for n, needs in families.items() if capability in needs))
    retention = tuple(sorted(n for n in families if n not in own and success.get(n, 0.0) > 0))
    share = context.settings.calibration.retention_share if retention else 0.0
    spec = CompositionSpec(context.round.target, context.round.data_hash, capability, own, retention, share, version)
    return ComposedEnvironment(context.target, spec)


def stored_environment(context: Context, capability: str) -> ComposedEnvironment | WrittenEnvironment:
    """The environment as it was stored by `synthesize`."""
    if context.settings.synthesizer.kind == "llm":
        return accepted_environment(context, capability)
    row = context.store.rows(
        "synthesized_environments", round_id=context.round.id, capability_id=row_id(context.round.id, capability)
    )[-1]
    spec: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row["spec"].items()}
    return ComposedEnvironment(context.target, CompositionSpec(**spec))


@task(name="synthesize", task_run_name="synthesize {capability}", **RETRIES)
def synthesize(round_id: str, capability: str) -> dict[str, Any]:
    """Compose or have written, store and validate; returns the environment's id, whether it passed, and why not."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        if context.settings.synthesizer.kind == "llm":
            return write_environment(context, capability)
        if not isinstance(context.target, Generators):
            reason = (
                f"target {context.round.target!r} has no generators to compose scenarios from; "
                "the llm synthesizer writes environments for such targets"
            )
            return {"accepted": False, "reasons": [reason], "environment": None}
        if not any(capability in needs for needs in context.target.families().values()):
            reason = (
                f"no family of {context.round.target!r} is tagged with {capability!r}, "
                "so nothing can be composed for it"
            )
            return {"accepted": False, "reasons": [reason], "environment": None}
        environment = compose(context, capability)
        spec = environment.spec
        identity = row_id(round_id, spec.id)
        with context.environment:
            verdict = validate_environment(environment.environment, environment.scenario, limits_of(context))
        context.store.put(
            "synthesized_environments",
            [
                {
                    "id": identity,
                    "round_id": round_id,
                    "capability_id": row_id(round_id, capability),
                    "version": spec.version,
                    "kind": "generators",
                    "spec": asdict(spec),
                    "code_hash": spec.id,
                    "state": "draft",
                    "sandbox_level": "none",
                    "verdicts": verdict.as_dict(),
                }
            ],
        )
        if context.store.row("synthesized_environments", id=identity)["state"] == "draft":  # type: ignore[index]
            context.store.set_state("synthesized_environments", identity, "checked" if verdict.accepted else "rejected")
        return {"accepted": verdict.accepted, "reasons": list(verdict.reasons), "environment": identity}

    return context.stage(f"synthesize:{capability}", work)


@task(name="calibrate", task_run_name="calibrate {capability}", **RETRIES)
def calibrate(round_id: str, capability: str, environment_id: str) -> dict[str, Any]:
    """Play the base `samples` times on each of `seeds` scenarios of the capability; decide whether it may train."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        measured = context.store.row("calibrations", id=row_id(environment_id, "calibration"))
        if measured is None:  # a written environment was calibrated before it was accepted
            calibration = measure(context, stored_environment(context, capability), f"calibrate {capability}")
            context.store.put("calibrations", [calibration.row(environment_id)])
            measured = context.store.row("calibrations", id=row_id(environment_id, "calibration"))
        assert measured is not None
        accepted, reason = bool(measured["accepted"]), str(measured["reason"])
        figures = {name: float(measured[name]) for name in FIGURES}
        if context.store.row("synthesized_environments", id=environment_id)["state"] == "checked":  # type: ignore[index]
            context.store.set_state("synthesized_environments", environment_id, "accepted" if accepted else "rejected")
        create_markdown_artifact(
            key=f"calibration-{capability.replace('_', '-')}",
            description=f"How the base model does in the environment made for {capability}",
            markdown=f"**{capability}**: {reason}\n\n" + "\n".join(f"- {k}: {v:.3f}" for k, v in figures.items()),
        )
        return {"accepted": accepted, "reason": reason, **figures}

    return context.stage(f"calibrate:{capability}", work)
