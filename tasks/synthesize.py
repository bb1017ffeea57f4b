"""Stage 4: one training environment per capability, composed from the target's generators or written by a model;
validated without a model, calibrated with the base."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import task

from db import row_id
from environments.contract import Generators
from environments.validation.checks import validate_environment
from tasks.round.context import current
from tasks.round.retries import RETRIES
from tasks.synthesis.calibration import limits_of
from tasks.synthesis.environments import compose
from tasks.synthesis.llm_synthesizer import write_environment


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
