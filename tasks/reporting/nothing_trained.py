"""Why a round trained nothing, in words that a person can act on."""

from __future__ import annotations

from collections.abc import Sequence

from environments.contract import Generators
from tasks.round.context import Context
from tasks.round.results import (
    CalibrateResult,
    ContrastResult,
    RolloutResult,
    SelectResult,
    SynthesizeResult,
    TrainResult,
)

# Capabilities, and reasons, named one by one.
NAMED = 3


def _named(capabilities: Sequence[str]) -> str:
    return ", ".join(capabilities[:NAMED]) + (" and others" if len(capabilities) > NAMED else "")


def nothing_trained(context: Context) -> str:
    """Where the round ended for its capabilities, what the base solved, and what else could be tried."""
    rollout, selected = context.result(RolloutResult), context.result(SelectResult).selected
    said = ["No capability could be trained."]
    said.append(f"The base solved {round(rollout.success * rollout.scored)} of {rollout.scored} diagnosis episodes.")
    if rollout.success == 0:
        said.append(
            "Without any success there is nothing to contrast failures with: Delta is then the share of failures that "
            "lack a capability, and a trainer would find no reward to tell rollouts apart."
        )
    if not selected:
        candidates = context.result(ContrastResult).candidates
        said.append(
            f"None of {len(candidates)} candidates passed the selection."
            if candidates
            else "The checks of the failed episodes name no capability that they lack."
        )
        return " ".join(said)
    said.append(f"Selected: {_named(selected)}.")
    found: dict[str, list[str]] = {}
    for capability in selected:
        if why := _reason(context, capability):
            found.setdefault(why, []).append(capability)
    # What holds for several is said once.
    for why, whom in list(found.items())[:NAMED]:
        said.append(f"{'Each' if len(whom) == len(selected) > 1 else _named(whom)}: {why}.")
    if not isinstance(context.target, Generators) and not context.settings.asks_a_model:
        said.append(
            "With a model as synthesizer (TRACE_SYNTHESIZER__KIND=llm and TRACE_ANALYST__MODEL) each selected "
            "capability would get a written environment in the sandbox, which must pass the same checks and the same "
            "calibration; with one as analyst (TRACE_ANALYST__KIND=llm) it would also name and label the capabilities."
        )
    return " ".join(said)


def _reason(context: Context, capability: str) -> str:
    """Why a selected capability has no adapter, as the stages stored it."""
    made = context.found(SynthesizeResult, capability)
    measured, trained = context.found(CalibrateResult, capability), context.found(TrainResult, capability)
    if trained and trained.verdict:
        return trained.verdict
    if made and not made.accepted:
        return "; ".join(reason for reason in made.reasons if reason)
    return measured.reason if measured else ""
