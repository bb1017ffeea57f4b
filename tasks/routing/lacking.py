"""What is still lacking where two have played the same tasks: the episodes of whichever a router would let answer.

What an adapter has unlearnt is no lack while the other one can still answer it: trained for, it would be learnt a
second time, from a worse start.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from models.router.first_observation import embed_openings
from models.router.regression import expect
from tasks.round.context import Context
from tasks.round.rollouts import outcomes
from tasks.routing.examples import stored_openings

# By how much more success has to be expected of the first, for it to be the one that answers: of a family's eight tasks
# nearly two. Where neither solves anything, chance would choose.
MARGIN = 0.2


def best_played(context: Context, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Of the trajectories of two that played the same tasks those of the one that would answer, by task: of `first`
    where its expected success is higher by `MARGIN`, else of `second`. What is expected of a task is what a regression
    on the others says, so that no episode speaks for itself."""
    frames = [outcomes(context.store, list(ids)) for ids in (first, second)]
    shares = pd.concat([f.groupby("task")["success"].mean() for f in frames], axis=1, keys=["first", "second"])
    both = shares.dropna()
    shown = frames[1].drop_duplicates("task").set_index("task")["id"]
    openings = stored_openings(context, [str(shown[task]) for task in both.index])
    both = both[[str(shown[task]) in openings for task in both.index]]
    if len(both) < 2:
        return list(second)
    with context.model:
        vectors = embed_openings(context.base.policy, [openings[str(shown[task])] for task in both.index])
    left_out = expect(vectors, both.to_numpy(dtype=float)).left_out.clip(0.0, 1.0)
    kept = set(both.index[left_out[:, 0] > left_out[:, 1] + MARGIN])
    chosen = [frames[0][frames[0]["task"].isin(kept)], frames[1][~frames[1]["task"].isin(kept)]]
    return [str(i) for frame in chosen for i in frame["id"]]
