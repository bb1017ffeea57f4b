"""Whether what is practised carries over, asked early: after the first third of a training the adapter plays the tasks
on which the capability was found lacking. Success that rises in the environment alone ends the training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from db import LabelRow, SelectionRow, Store, row_id
from environments.contract import TargetTask
from models.episodes import Episode
from tasks.mining.labels import LACKING
from tasks.mining.selection import EVIDENCE
from tasks.round.results import RolloutResult, TransferFigures
from tasks.round.stored import StoredRound
from tasks.synthesis.author_feedback import typical_episodes

VERDICT = "does-not-transfer"
# Rise of success in the environment from which the target's tasks must show some, too; and the fewest of them that say
# anything, however often each is played: of eight an adapter that solves a third solves none in one case of 25.
RISE, LEAST_TASKS = 0.2, 8
# Steps of the shortest training that has a first third to look back on.
LEAST_STEPS = 3


def first_third(steps: int) -> int | None:
    """The step after which a training of so many steps is looked at; None for one that is too short."""
    return -(-steps // 3) if steps >= LEAST_STEPS else None


def failed_tasks(stored: StoredRound, capability: str, tasks: Sequence[TargetTask]) -> list[TargetTask]:
    """Of the round's diagnosis `tasks`, those that failed for lack of the capability, most votes first, at most
    `EVIDENCE`; none where the round has neither rolled out nor selected.

    What is kept as evidence comes first, then what was labelled alike: with several trials a task the evidence alone
    is often of fewer tasks than the verdict needs."""
    identity = row_id(stored.round.id, capability)
    selected = stored.store.row(SelectionRow, round_id=stored.round.id, capability_id=identity)
    if selected is None or stored.found(RolloutResult) is None:
        return []
    labels = stored.store.rows(LabelRow, round_id=stored.round.id, capability_id=identity, label=LACKING)
    votes = Counter(label.trajectory_id for label in labels)
    others = sorted(votes, key=lambda trajectory: (-votes[trajectory], trajectory))
    ids = list(dict.fromkeys([*(str(evidence["id"]) for evidence in selected.evidence), *others]))
    frame = stored.store.trajectory_frame(None, id=ids, columns=["id", "task_id", "success"])
    task_of = {row.id: row.task_id for row in frame.itertuples() if not row.success}
    by_id = {task.id: task for task in tasks}
    names = dict.fromkeys(task_of[i] for i in ids if i in task_of)
    return [by_id[name] for name in names if name in by_id][:EVIDENCE]


def target_episodes(tasks: Sequence[TargetTask], most: int, seed: int, adapter: str | None) -> list[Episode]:
    """At most `most` episodes of the adapter, evenly over `tasks`."""
    trials = max(1, most // len(tasks)) if tasks else 0
    return [Episode("", task, seed, trial, adapter) for task in tasks[:most] for trial in range(trials)]


def transfer_of(step: int, start: pd.DataFrame, now: pd.DataFrame, tried: pd.DataFrame) -> TransferFigures:
    """What the check came to, from outcomes (see `outcomes`): in the environment on the same scenarios at the start
    and after `step`, and on the target's tasks after it."""
    before, after = float(start["success"].mean()), float(now["success"].mean())
    wins = int(tried["success"].sum())
    verdict = ""
    if after - before >= RISE - 1e-9 and not wins and tried["task"].nunique() >= LEAST_TASKS:
        verdict = (
            f"{VERDICT}: after step {step} success in the environment rose from {before:.0%} to {after:.0%}, and none "
            f"of {len(tried)} episodes on {tried['task'].nunique()} tasks that lacked the capability succeeded"
        )
    return TransferFigures(
        step=step,
        before=before,
        after=after,
        episodes=len(tried),
        tasks=int(tried["task"].nunique()),
        successes=wins,
        verdict=verdict,
        practised=list(now["id"]),
        tried=list(tried["id"]),
    )


def transfer_verdict(store: Store, found: TransferFigures, outcome_of: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """The check as a verdict on the environment (as `ValidationVerdict.as_dict`), for its author: the figures, and
    episodes from both sides (`outcome_of` has the outcomes of `practised` and `tried`): the best in the environment,
    the worst and the median on the target."""
    inside = typical_episodes(store, outcome_of["practised"], "the trained agent in your environment")
    outside = typical_episodes(store, outcome_of["tried"], "the trained agent on the target")
    figures = {
        "success_before": found.before,
        "success_after": found.after,
        "target_success": found.successes / found.episodes,
        "exhibits": [*inside[-1:], *outside[:2]],
    }
    return {"accepted": False, "reasons": [found.verdict], "figures": figures}


def transfer_metrics(found: TransferFigures) -> dict[str, float]:
    """The early check's figures as MLflow metrics; without the target's where every episode on it was lost."""
    metrics = {"transfer/environment_before": found.before, "transfer/environment_after": found.after}
    return metrics | ({"transfer/target_success": found.successes / found.episodes} if found.episodes else {})
