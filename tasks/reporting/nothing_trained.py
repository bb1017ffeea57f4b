"""Why a round trained nothing, in words that a person can act on."""

from __future__ import annotations

from collections.abc import Sequence

from environments.contract import Generators, Target
from tasks.round.results import (
    CalibrateResult,
    ContrastResult,
    RolloutResult,
    SelectResult,
    StoredRound,
    SynthesizeResult,
    TrainResult,
)

# Capabilities, and reasons, named one by one.
NAMED = 3


def _named(capabilities: Sequence[str]) -> str:
    return ", ".join(capabilities[:NAMED]) + (" and others" if len(capabilities) > NAMED else "")


def nothing_trained(stored: StoredRound, target: Target, asks_a_model: bool) -> str:
    """Where the round ended for its capabilities, what the base solved, and what else could be tried: a language model,
    where the round asks none (`asks_a_model`) and `target` has no generators."""
    rollout, selected = stored.result(RolloutResult), stored.result(SelectResult).selected
    said = ["No capability could be trained."]
    said.append(f"The base solved {round(rollout.success * rollout.scored)} of {rollout.scored} diagnosis episodes.")
    if rollout.success == 0:
        said.append(
            "Without any success there is nothing to contrast failures with: Delta is then the share of failures that "
            "lack a capability, and a trainer would find no reward to tell rollouts apart."
        )
    if not selected:
        candidates = stored.result(ContrastResult).candidates
        said.append(
            f"None of {len(candidates)} candidates passed the selection."
            if candidates
            else "The checks of the failed episodes name no capability that they lack."
        )
        return " ".join(said)
    said.append(f"Selected: {_named(selected)}.")
    found: dict[str, list[str]] = {}
    for capability in selected:
        if why := _reason(stored, capability):
            found.setdefault(why, []).append(capability)
    # What holds for several is said once.
    for why, whom in list(found.items())[:NAMED]:
        said.append(f"{'Each' if len(whom) == len(selected) > 1 else _named(whom)}: {why}.")
    if not isinstance(target, Generators) and not asks_a_model:
        said.append(
            "With a model as synthesizer (TRACE_SYNTHESIZER__KIND=llm and TRACE_ANALYST__MODEL) each selected "
            "capability would get a written environment in the sandbox, which must pass the same checks and the same "
            "calibration; with one as analyst (TRACE_ANALYST__KIND=llm) it would also name and label the capabilities."
        )
    return " ".join(said)


def _reason(stored: StoredRound, capability: str) -> str:
    """Why a selected capability has no adapter, as the stages stored it."""
    made = stored.found(SynthesizeResult, capability)
    measured, trained = stored.found(CalibrateResult, capability), stored.found(TrainResult, capability)
    if trained and trained.unused:
        return trained.unused
    if made and not made.accepted:
        return "; ".join(reason for reason in made.reasons if reason)
    return measured.reason if measured else ""
