"""Whether a target's tasks are in the splits that they were in before: what was learnt from a task of diagnosis must
not be measured on it as one of test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from db import Round, Store
from environments.contract import SPLITS, TargetTask
from errors import TargetError


def refuse_moved(store: Store, called: str, data_hash: str, tasks: Mapping[str, Sequence[TargetTask]]) -> None:
    """Raise TargetError where a fixed task is in another split than in the newest round on the same data that has
    played anything. `called` is the name that rounds are stored under."""
    where = {task.id: split for split, each in tasks.items() for task in each}
    rounds = store.rows(Round, target=called, data_hash=data_hash)
    for before in sorted(rounds, key=lambda r: r.number, reverse=True):
        played = store.query(
            "SELECT DISTINCT task_id, split FROM trajectories WHERE round_id = :r AND purpose IN ('diagnosis', "
            "'evaluation')",
            r=before.id,
        )
        moved = [(i, old) for i, old in played.itertuples(index=False) if old in SPLITS and where.get(i, old) != old]
        if moved:
            task, old = moved[0]
            raise TargetError(
                f"task {task!r} of {called} was of {old} in round {before.number} and is of {where[task]} now "
                f"({len(moved)} tasks have moved), so that releases are measured on what they were trained on; give "
                "each task the same split every time (sort a set before it is divided: its order is another in each "
                "process), or change data_hash where the splits are to be others"
            )
        if len(played):
            return
