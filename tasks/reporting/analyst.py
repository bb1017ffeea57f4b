"""What the report says about a language model that labelled trajectories or wrote environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.sandbox.workers import SandboxLevel
from tasks.reporting.figures import AnalystFigures, CapabilityFigures, SynthesisVersion
from tasks.round.context import Context
from tasks.synthesis.llm_synthesizer import UNCONFINED


def analyst_figures(context: Context, results: Mapping[str, Mapping[str, Any]]) -> AnalystFigures | None:
    """The model, its cost and the result of labelling; None on a round that asks no model."""
    settings = context.settings
    if not settings.asks_a_model:
        return None
    spent, contrast = context.store.spent(context.round.id), results.get("contrast", {})
    stages: dict[str, float] = {}
    for row in context.store.rows("spend", round_id=context.round.id):
        stages[row["stage"]] = stages.get(row["stage"], 0.0) + row["dollars"]
    return AnalystFigures(
        model=settings.analyst.model,
        calls=int(spent["calls"]),
        prompt_tokens=int(spent["prompt_tokens"]),
        sampled_tokens=int(spent["sampled_tokens"]),
        dollars=float(spent["dollars"]),
        seconds=round(float(spent["seconds"]), 1),
        stages=stages,
        runs=contrast.get("runs"),
        refused=[f"run {run}: {why}" for run, why in contrast.get("refused", {}).items()],
        too_long=len(contrast.get("too_long", ())),
    )


def versions_of(context: Context, capability_id: str) -> list[SynthesisVersion]:
    """The versions of a capability's environment that a model wrote, in order."""
    rows = context.store.rows(
        "synthesized_environments", round_id=context.round.id, capability_id=capability_id, kind="llm"
    )
    return [
        SynthesisVersion(
            number=r["version"],
            accepted=r["state"] in ("accepted", "withdrawn"),
            code_hash=r["code_hash"][:12],
            sandbox=r["sandbox_level"],
            reasons=list(r["spec"].get("reasons", ())),
        )
        for r in sorted(rows, key=lambda r: r["version"])
    ]


def analyst_warnings(capabilities: Sequence[CapabilityFigures], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a reader must know before believing the figures."""
    contrast = results.get("contrast", {})
    warnings = [f"Labelling run {run} was refused: {why}" for run, why in contrast.get("refused", {}).items()]
    if contrast.get("too_long"):
        warnings.append(
            f"{len(contrast['too_long'])} trajectories were too long to be labelled (analyst.trajectory_tokens); "
            "coverage and contrast are without them."
        )
    if any(v.sandbox == str(SandboxLevel.PROCESS) for c in capabilities for v in c.versions):
        warnings.append(UNCONFINED)
    return warnings
