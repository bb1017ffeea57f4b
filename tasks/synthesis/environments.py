"""The environment of a capability: composed from the target's generators, or read back as it was stored."""

from __future__ import annotations

from typing import Any

from db import EnvironmentRow, row_id
from environments.contract import Generators
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.written import WrittenEnvironment
from tasks.round.context import Context
from tasks.round.rollouts import diagnosis_ids, outcomes
from tasks.synthesis.llm_synthesizer import accepted_environment

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
        EnvironmentRow, round_id=context.round.id, capability_id=row_id(context.round.id, capability)
    )[-1]
    spec: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.spec.items()}
    return ComposedEnvironment(context.target, CompositionSpec(**spec))
