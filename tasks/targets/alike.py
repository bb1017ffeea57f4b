"""Whether tasks of two splits are the same to an agent. Where a task is made from its seed, and every split counts its
seeds from 0, no payload tells: what is measured is what was learnt."""

from __future__ import annotations

import logging
from itertools import combinations

from environments.contract import SPLITS, Target
from environments.picking import spread
from environments.targets.catalogue import is_builtin, without_model
from environments.validation.apart import met_alike
from errors import EnvironmentFault, TargetError
from models.episodes import Guarded

logger = logging.getLogger("trace")

# Tasks of a split that are looked for in another one, and for how long at most.
LOOKED_AT, SECONDS = 20, 1.5


def check_alike(target: Target) -> None:
    """Warn where tasks of two splits show the same and are solved alike. A target that says itself which tasks are the
    same (`Drawable.content`) is believed (`environments/validation/apart.py`). Nothing is looked at where a model would
    be paid for playing the user."""
    playable = None if is_builtin(target) or hasattr(target, "content") else without_model(target)
    if playable is None:
        return
    make = playable.environment
    for first, second in combinations(SPLITS, 2):
        looked_at = spread(target.tasks(second), LOOKED_AT)
        try:
            alike = met_alike(lambda: Guarded.made(make), target.tasks(first), looked_at, SECONDS)
        except (EnvironmentFault, TargetError):  # it cannot be made or closed, which is told where its kinds are
            return
        if alike:
            logger.warning(
                "%d of %d tasks of %s that were looked at show and want what tasks of %s do, such as %r (target %s): "
                "figures are of what was learnt by heart; make each split of seeds, or of things, of its own",
                len(alike), len(looked_at), second, first, alike[0].id, target.name,
            )  # fmt: skip
            return
