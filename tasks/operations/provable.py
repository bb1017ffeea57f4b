"""Whether a finite target has the validation tasks on which what a round trains could be proven: with too few of them
no p-value gets below the level, however much is learnt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from db import LookRow, Store
from environments.contract import Drawable, Generators, Target
from environments.picking import spread
from settings import Settings
from tasks.measuring.gate_plan import alpha_at


def own_tasks(target: Target, most: int = 0) -> Mapping[str, int]:
    """How many validation tasks each capability of a target with generators has as its own: those of the families that
    need it, of the `most` that a round plays (0: of all)."""
    assert isinstance(target, Generators)
    split = list(target.tasks("validation"))
    tasks, own = Counter(task.family for task in spread(split, most or len(split))), Counter[str]()
    for family, needs in target.families().items():
        own.update(dict.fromkeys(needs, tasks[family]))
    return own


def unprovable(store: Store, target: Target, settings: Settings) -> str:
    """Which capabilities have fewer own tasks than an adapter needs that wins them all, at the next look at validation;
    "" where each has enough, where they are drawn, and where families are not known."""
    if isinstance(target, Drawable) or not isinstance(target, Generators):
        return ""
    # Stored under the name that the target is called by, whatever its own is.
    looks = store.rows(LookRow, target=settings.target, data_hash=target.data_hash, split="validation", draw=0)
    look, most = 1 + len(looks), settings.rollout.tasks
    # Of m differences the least p-value is 2 / 2^m (`PairedDifference.floor_p`).
    needed = math.ceil(1 - math.log2(alpha_at(look, settings.evaluation.alpha)))
    few = {capability: count for capability, count in sorted(own_tasks(target, most).items()) if count < needed}
    if not few:
        return ""
    listed = ", ".join(f"{capability} ({count})" for capability, count in few.items())
    return (
        f"an adapter needs {needed} validation tasks of its own capability's families at look {look} at them, if it "
        f"wins each, and fewer have {listed}: nothing trained for one of these alone can be proven, whatever it gains; "
        f"give these families more validation tasks, {f'raise rollout.tasks = {most}, ' if most else ''}or let the "
        "target draw (docs/4-targets.md, draws)"
    )
