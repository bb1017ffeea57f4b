"""What the report says about labelling, and about a language model that labelled trajectories or wrote environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from db import EnvironmentRow, EnvironmentState, SpendRow, Store
from environments.sandbox.workers import SandboxLevel
from models.providers.litellm_client import price_of
from settings import Settings
from tasks.reporting.capabilities import banked
from tasks.reporting.figures import AnalystFigures, CapabilityFigures
from tasks.round.analyst import models_of
from tasks.round.results import ContrastResult
from tasks.synthesis.llm_synthesizer import UNCONFINED
from tasks.synthesis.module_writer import STAGE as WRITING


def analyst_figures(
    settings: Settings, store: Store, round_id: str, contrast: ContrastResult | None
) -> AnalystFigures | None:
    """The models, their cost, and how labelling ended; None on a round that asks none."""
    rows = store.rows(SpendRow, round_id=round_id)
    if not (settings.asks_a_model or rows):
        return None
    spent = store.spent(round_id)
    stages: dict[str, float] = {}
    for row in rows:
        stages[row.stage] = stages.get(row.stage, 0.0) + row.dollars
    return AnalystFigures(
        model=", ".join(sorted({row.model for row in rows})) or settings.analyst.model,
        calls=int(spent["calls"]),
        prompt_tokens=int(spent["prompt_tokens"]),
        sampled_tokens=int(spent["sampled_tokens"]),
        dollars=float(spent["dollars"]),
        seconds=round(float(spent["seconds"]), 1),
        stages=stages,
        runs=contrast.runs if contrast else None,
        refused=[f"run {run}: {why}" for run, why in contrast.refused.items()] if contrast else [],
        too_long=len(contrast.too_long) if contrast else 0,
        filtered=len(contrast.filtered) if contrast else 0,
        judge=settings.judge,
        author=settings.author,
        **_each(store, round_id, [row for row in rows if row.stage == WRITING]),
    )


def _each(store: Store, round_id: str, written: Sequence[SpendRow]) -> dict[str, Any]:
    """How many environments were accepted, how many of these came from the bank, and what one cost, refused versions
    and capabilities that got none included."""
    rows = store.rows(EnvironmentRow, round_id=round_id, kind="llm")
    accepted = [row for row in rows if row.state == EnvironmentState.ACCEPTED]
    found: dict[str, Any] = {
        "environments": len(accepted),
        "banked": sum(map(banked, accepted)),
    }
    if accepted:
        tokens = sum(row.prompt_tokens + row.sampled_tokens for row in written)
        found["dollars_each"] = sum(row.dollars for row in written) / len(accepted)
        found["calls_each"] = sum(row.calls for row in written) / len(accepted)
        found["tokens_each"] = tokens / len(accepted)
    return found


def unpriced(settings: Settings, store: Store, round_id: str) -> dict[str, int]:
    """Models of a round that nobody gave a price for and LiteLLM has none of, with their tokens: these were counted as
    0 dollars."""
    tokens: dict[str, int] = {}
    paid: set[str] = {how.model for _, how in models_of(settings) if how.price is not None}
    for row in store.rows(SpendRow, round_id=round_id):
        tokens[row.model] = tokens.get(row.model, 0) + row.prompt_tokens + row.sampled_tokens
        paid |= {row.model} if row.dollars else set()
    return {m: n for m, n in sorted(tokens.items()) if n and m not in paid and price_of(m) is None}


def analyst_warnings(
    capabilities: Sequence[CapabilityFigures],
    contrast: ContrastResult | None,
    without_price: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """What a reader must know before believing the figures. `without_price` is from `unpriced`."""
    warnings = [
        f"Nobody gave a price for {model} and LiteLLM has none of it: its {tokens:,} tokens are counted as 0 dollars. "
        "Set prompt_price and sampled_price (0 for a server of your own)."
        for model, tokens in without_price.items()
    ]
    if contrast:
        warnings += [f"Checks of the kind '{kind}' are left out: it {why}." for kind, why in contrast.left_out.items()]
        warnings += [f"Labelling run {run} was refused: {why}" for run, why in contrast.refused.items()]
    if contrast and contrast.too_long:
        warnings.append(
            f"{len(contrast.too_long)} trajectories were too long to be labelled (analyst.trajectory_tokens); "
            "coverage and contrast are without them."
        )
    if contrast and contrast.filtered:
        warnings.append(
            f"{len(contrast.filtered)} trajectories were refused by the model or its provider's filter, or got no "
            "usable reply, also alone; coverage and contrast are without them."
        )
    if contrast and contrast.unread:
        warnings.append(
            f"{len(contrast.unread)} trajectories were refused by the model or its provider's filter when candidates "
            "were looked for; these were named without them."
        )
    if any(v.sandbox == str(SandboxLevel.PROCESS) for c in capabilities for v in c.versions):
        warnings.append(UNCONFINED)
    return warnings
