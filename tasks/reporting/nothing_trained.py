"""How the practising of a round ended: with an adapter, well without one, or with nothing trained, and then why, in
words that a person can act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from db import GENERALIST
from environments.contract import Generators, Target
from tasks.reporting.figures import Ending, percent, release_name
from tasks.round.results import (
    CalibrateResult,
    ContrastResult,
    RegisterResult,
    RolloutResult,
    SelectResult,
    SynthesizeResult,
    TrainResult,
)
from tasks.round.stored import StoredRound

# Capabilities, and reasons, named one by one.
NAMED = 3


@dataclass(frozen=True)
class Ended:
    """How practising ended, and why no adapter came of it ("" when one did)."""

    kind: Ending
    reason: str = ""


def ending_of(stored: StoredRound, rho: float) -> Ending:
    """How practising ended in a round whose stages are done.

    Nothing is lacking when nothing was selected and less than `rho`, the share of failures that a capability must be
    lacking in to be selected, failed at all. What is mastered was selected, and solved in the environments made for it.
    """
    selected = stored.result(SelectResult)
    if any(stored.goes_on(RegisterResult, c) for c in selected.selected):
        return Ending.TRAINED
    rollout = stored.diagnosis()
    if not selected.selected and not selected.unfit and rollout.scored - _solved(rollout) < rho * rollout.scored:
        return Ending.NOTHING_LACKING
    capabilities = _capabilities(selected)
    if capabilities and all(_mastered(stored, c) for c in capabilities):
        return Ending.MASTERED
    return Ending.NOTHING_TRAINED


def how_it_ended(stored: StoredRound, target: Target, asks_a_model: bool, rho: float) -> Ended:
    """How practising ended, and why it gave no adapter: what the live release solved and where the round ended for its
    capabilities; and what else could be tried, a language model, where the round asks none (`asks_a_model`) and
    `target` has no generators."""
    kind = ending_of(stored, rho)
    if kind is Ending.TRAINED:
        return Ended(kind)
    rollout = stored.diagnosis()
    who = release_name(rollout.release) if rollout.release else "the base"
    solved = f"{who} solved {_solved(rollout)} of {rollout.scored} diagnosis episodes"
    if kind is Ending.NOTHING_LACKING:
        left = f" ({percent(1 - rollout.success)} failed; below {percent(rho)}, rho, nothing counts as lacking)"
        left = "" if rollout.success == 1 else left
        return Ended(kind, f"Nothing is lacking that could be trained: {solved}{left}. The round ends early and well.")
    if kind is Ending.MASTERED:
        what = _named(_capabilities(stored.result(SelectResult)))
        return Ended(kind, f"Mastered: {who} solves the environments of what it seemed to lack ({what}), so there is "
                     f"nothing left to learn from them; {solved}.")  # fmt: skip
    return Ended(kind, _nothing_trained(stored, target, asks_a_model, solved))


def _nothing_trained(stored: StoredRound, target: Target, asks_a_model: bool, solved: str) -> str:
    rollout, selected = stored.diagnosis(), _capabilities(stored.result(SelectResult))
    sentences = ["No capability could be trained.", f"{solved[:1].upper()}{solved[1:]}."]
    if rollout.success == 0:
        sentences.append(
            "Without any success there is nothing to contrast failures with: Delta is then the share of failures that "
            "lack a capability, and a trainer would find no reward to tell rollouts apart."
        )
    if not selected:
        contrast = stored.result(ContrastResult)
        if contrast.candidates:
            sentences.append(f"None of {len(contrast.candidates)} candidates passed the selection.")
        elif contrast.analyst == "checks":
            sentences.append("The checks of the failed episodes name no capability that they lack.")
        else:
            sentences.append("No capability was named: a contrast needs failures and successes that can be labelled.")
        return " ".join(sentences)
    sentences.append(f"Selected: {_named(selected)}.")
    reasons: dict[str, list[str]] = {}
    for capability in selected:
        if why := _reason(stored, capability):
            reasons.setdefault(why, []).append(capability)
    # What holds for several is said once.
    for why, whom in list(reasons.items())[:NAMED]:
        sentences.append(f"{'Each' if len(whom) == len(selected) > 1 else _named(whom)}: {why.rstrip('.')}.")
    if not isinstance(target, Generators) and not asks_a_model:
        sentences.append(
            "With a model as synthesizer (TRACE_SYNTHESIZER__KIND=llm and TRACE_ANALYST__MODEL) each selected "
            "capability would get a written environment in the sandbox, which must pass the same checks and the same "
            "calibration; with one as analyst (TRACE_ANALYST__KIND=llm) it would also name and label the capabilities."
        )
    return " ".join(sentences)


def _capabilities(selected: SelectResult) -> list[str]:
    """What was selected by the rule: the generalist needs them, and ends with them."""
    return [c for c in selected.selected if c != GENERALIST]


def _solved(rollout: RolloutResult) -> int:
    return round(rollout.success * rollout.scored)


def _named(capabilities: Sequence[str]) -> str:
    return ", ".join(capabilities[:NAMED]) + (" and others" if len(capabilities) > NAMED else "")


def _mastered(stored: StoredRound, capability: str) -> bool:
    """Whether what is live solves all of a capability's environment: in calibration, or at the first step."""
    measured, trained = stored.found(CalibrateResult, capability), stored.found(TrainResult, capability)
    if trained is not None:
        return trained.ending == Ending.MASTERED and trained.chosen == 0
    return measured is not None and measured.mastered


def _reason(stored: StoredRound, capability: str) -> str:
    """Why a selected capability has no adapter, as the stages stored it."""
    made = stored.found(SynthesizeResult, capability)
    measured, trained = stored.found(CalibrateResult, capability), stored.found(TrainResult, capability)
    if trained is not None:
        measuring = stored.found(RegisterResult, capability)
        return trained.unused or (measuring.skipped if measuring else "")
    if made and not made.accepted:
        return "; ".join(reason for reason in made.reasons if reason)
    return measured.reason if measured else ""
