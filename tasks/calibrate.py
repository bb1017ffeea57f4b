"""Stage 4, second half: the base plays the environment; only an informative one may train."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact

from db import row_id
from tasks.round.context import current
from tasks.round.retries import RETRIES
from tasks.synthesis.calibration import FIGURES, measure
from tasks.synthesis.environments import stored_environment


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
