"""The generalist: one more adapter, trained last, on the environments of all that the round has trained for.

With `train.generalist` steps a round trains it once its capabilities are through, from whichever of their adapters does
best on all of their families together, with everything else that the base does for retention. It goes through the same
stages as they do, under this name: validated, trained, registered, judged alone against what is live, and offered to
the router, which sends it what it solves best. What is unlike all that a round has seen is what an adapter for one
capability knows nothing of; the generalist has met every kind of task.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from db import GENERALIST, CapabilityRow, SelectionRow, row_id
from environments.contract import Generators
from environments.synthesized.composed import ComposedEnvironment
from tasks.measuring.lineup import champion_of
from tasks.round.adapters import registered
from tasks.round.context import Context
from tasks.round.results import CalibrateResult
from tasks.synthesis.calibration import FIGURES
from tasks.synthesis.environments import composed_of, stored_environment

logger = logging.getLogger("trace")

DEFINITION = "All that the round trained for, practised together after each of them alone."
# Of many kinds of tasks most may be solved, or hopeless: two collections without an informative group say little.
PATIENCE = 6
REASON = "The round trains it last, on the environments of all capabilities that it has trained for."


def specialists(capabilities: Sequence[str]) -> list[str]:
    """The capabilities, in order, without the generalist."""
    return [c for c in capabilities if c != GENERALIST]


def wanted(context: Context, selected: Sequence[str]) -> bool:
    """Whether a round that selected these capabilities may train a generalist: two of them, or one beside a generalist
    that is live and would else fall behind. Where environments are not composed it is said that there is none."""
    if not context.settings.train.generalist or len(selected) < _fewest(context):
        return False
    if context.settings.synthesizer.kind == "llm" or not isinstance(context.target, Generators):
        logger.warning("no generalist is trained: environments that a model writes are not brought together in one")
        return False
    return True


def store_generalist(context: Context, rank: int) -> None:
    """Keep the generalist where capabilities are kept: selected, without figures of the rule."""
    identity = row_id(context.round.id, GENERALIST)
    context.store.put(
        [
            CapabilityRow(
                id=identity,
                round_id=context.round.id,
                name=GENERALIST,
                definition=DEFINITION,
                analyst=context.settings.analyst.kind,
            )
        ]
    )
    context.store.put(
        [
            SelectionRow(
                round_id=context.round.id,
                capability_id=identity,
                selected=True,
                rank=rank,
                runs=context.settings.selection.runs,
                reason=REASON,
            )
        ]
    )


def compose_generalist(
    context: Context, success: Mapping[str, float], version: int = 1
) -> tuple[ComposedEnvironment | None, str]:
    """The environment of all families that the round's adapters were trained for, or why there is none; `success` is
    that of what is live, by family."""
    parts = specialists(registered(context.stored))
    if len(parts) < _fewest(context):
        return None, f"{len(parts)} of the selected capabilities have an adapter: there is nothing to bring together"
    made = [stored_environment(context.store, context.round, context.target, c, context.keep) for c in parts]
    families = {family for environment in made for family in environment.spec.families}
    share = context.settings.calibration.retention_share
    return composed_of(context.target, context.round, GENERALIST, sorted(families), success, share, version), ""


def generalist_steps(context: Context, adapter: str) -> int:
    """The most steps of its training: as many as are set, and no more than the budget pays for, where one is kept."""
    train = context.settings.train
    if context.budget is None:
        return train.generalist
    return max(1, min(train.generalist, context.budget.for_training(adapter) // (train.groups * train.group_size)))


def calibrated_by_parts(context: Context) -> CalibrateResult:
    """The means of its parts' figures: each of them was measured, and nothing is played again."""
    parts = [context.result(CalibrateResult, c) for c in specialists(registered(context.stored))]
    figures = {name: sum(getattr(part, name) for part in parts) / len(parts) for name in FIGURES}
    reason = f"accepted: its {len(parts)} parts were calibrated, and these are the means of their figures"
    return CalibrateResult(accepted=True, reason=reason, **figures)


def _fewest(context: Context) -> int:
    return 1 if champion_of(context, GENERALIST) else 2
