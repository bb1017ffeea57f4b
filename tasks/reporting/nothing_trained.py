"""Why a round trained nothing, in words that a person can act on."""

from __future__ import annotations

from collections.abc import Sequence

from db import StageRow
from environments.contract import Generators
from tasks.round.context import current

# Capabilities, and reasons, named one by one.
NAMED = 3


def _named(capabilities: Sequence[str]) -> str:
    return ", ".join(capabilities[:NAMED]) + (" and others" if len(capabilities) > NAMED else "")


def nothing_trained(round_id: str, selected: Sequence[str]) -> str:
    """Where the round ended for its capabilities, what the base solved, and what else could be tried."""
    context = current(round_id)
    results = {stage.name: stage.result or {} for stage in context.store.rows(StageRow, round_id=round_id)}
    rollout = results.get("rollout", {})
    said = ["No capability could be trained."]
    success = rollout.get("success")
    if success is not None:
        scored = int(rollout["episodes"]) - int(rollout["errors"])
        said.append(f"The base solved {round(success * scored)} of {scored} diagnosis episodes.")
    if success == 0:
        said.append(
            "Without any success there is nothing to contrast failures with: Delta is then the share of failures that "
            "lack a capability, and a trainer would find no reward to tell rollouts apart."
        )
    if not selected:
        candidates = results.get("contrast", {}).get("candidates", [])
        said.append(
            f"None of {len(candidates)} candidates passed the selection."
            if candidates
            else "The checks of the failed episodes name no capability that they lack."
        )
        return " ".join(said)
    said.append(f"Selected: {_named(selected)}.")
    found: dict[str, list[str]] = {}
    for capability in selected:
        made, measured = results.get(f"synthesize:{capability}", {}), results.get(f"calibrate:{capability}", {})
        reasons = made.get("reasons") if not made.get("accepted") else [measured.get("reason", "")]
        trained = results.get(f"train:{capability}", {}).get("verdict", "")
        why = trained or "; ".join(r for r in reasons or [] if r)
        if why:
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
