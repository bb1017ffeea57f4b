"""The analyst without a model: candidates and labels from the verifier's own checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from errors import LabelError
from tasks.mining.labels import LABELS, LACKING, PRESENT


@dataclass(frozen=True)
class Candidate:
    """A capability found in the checks. `coverage` is the share of failed trajectories that lack it, in [0, 1]."""

    name: str
    definition: str
    coverage: float
    failed_examples: tuple[str, ...]
    passed_examples: tuple[str, ...]


def discover_candidates(checks: pd.DataFrame, outcomes: pd.DataFrame, limit: int = 10) -> tuple[Candidate, ...]:
    """Candidate capabilities from the verifier's checks: the kinds that most failed trajectories lack, at most `limit`.

    `checks` has trajectory_id, name, kind, required, passed, detail; `outcomes` has trajectory_id and passed. A kind
    that no failed trajectory lacks is no candidate. Order: coverage descending, ties by name."""
    passed_by_id = outcomes.set_index("trajectory_id")["passed"].astype(bool)
    failed_count = int((~passed_by_id).sum())
    needed = checks[checks["required"].astype(bool)]
    needed = needed.assign(won=needed["trajectory_id"].map(passed_by_id))
    if needed["won"].isna().any():
        stray = needed.loc[needed["won"].isna(), "trajectory_id"].iloc[0]
        raise LabelError(f"checks speak of trajectory {stray!r}, which has no outcome; give both from one round")
    found = []
    for kind, rows in needed.groupby("kind", sort=True, observed=True):
        shown = rows.groupby("trajectory_id", sort=True, observed=True).agg(
            all_passed=("passed", "all"), won=("won", "first")
        )
        won = shown["won"].astype(bool)
        lost = shown.index[~shown["all_passed"].astype(bool) & ~won]
        if not len(lost):
            continue
        found.append(
            Candidate(
                name=str(kind),
                definition=_definition(str(kind), rows, len(shown), len(passed_by_id)),
                coverage=len(lost) / failed_count,
                failed_examples=tuple(map(str, lost[:3])),
                passed_examples=tuple(map(str, shown.index[shown["all_passed"].astype(bool) & won][:3])),
            )
        )
    return tuple(sorted(found, key=lambda c: (-c.coverage, c.name))[:limit])


def bootstrap_labels(checks: pd.DataFrame, outcomes: pd.DataFrame, runs: int = 10, seed: int = 0) -> pd.DataFrame:
    """The `checks` analyst: labels from required checks, N runs as bootstrap resamples, ready for `select`.

    `checks` has trajectory_id, kind, required, passed; `outcomes` has trajectory_id, task_id, passed, one row a
    trajectory. Label of a pair: no required check of the kind = NA, all required ones passed = PRESENT, any failed =
    LACKING.

    A run draws *tasks* with replacement and gives each trajectory its task's number of draws as `weight` (0 when
    undrawn, so that every run still holds every pair). Trials of one task are near copies; drawing trajectories one by
    one would make ten runs agree that rest on two tasks. Draws are not stratified: by outcome would fix the share of
    failures, which is part of what varies, and by family would use a truth that analysts do not see."""
    if outcomes["trajectory_id"].duplicated().any() or outcomes.empty:
        raise LabelError(f"outcomes must hold each trajectory once, got {len(outcomes)} rows with repeats or none")
    ids = pd.Index(outcomes["trajectory_id"].astype(object))
    trajectory = ids.get_indexer(pd.Index(checks["trajectory_id"].astype(object)))
    if (trajectory < 0).any():
        stray = checks["trajectory_id"].iloc[int(np.argmax(trajectory < 0))]
        raise LabelError(f"checks speak of trajectory {stray!r}, which has no outcome; give both from one round")
    kind, kinds = pd.factorize(checks["kind"].astype(object), sort=True)
    required = checks["required"].to_numpy(dtype=bool)
    failed = required & ~checks["passed"].to_numpy(dtype=bool)
    label = np.zeros((len(kinds), len(ids)), dtype=np.int8)
    label[kind[required], trajectory[required]] = LABELS.index(PRESENT)
    label[kind[failed], trajectory[failed]] = LABELS.index(LACKING)

    task, tasks = pd.factorize(outcomes["task_id"].astype(object))
    draws = np.random.default_rng(seed).multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), size=runs)
    weight = draws.astype(np.int16)[:, task]  # (runs, trajectories)
    pairs = len(kinds) * len(ids)
    each = np.tile(np.arange(len(ids), dtype=np.int32), len(kinds) * runs)
    return pd.DataFrame(
        {
            "run": np.repeat(np.arange(runs, dtype=np.int16), pairs),
            "trajectory_id": pd.Categorical.from_codes(each, categories=ids),
            "capability": pd.Categorical.from_codes(
                np.tile(np.repeat(np.arange(len(kinds), dtype=np.int16), len(ids)), runs), categories=pd.Index(kinds)
            ),
            "label": pd.Categorical.from_codes(np.tile(label.reshape(-1), runs), categories=pd.Index(LABELS)),
            "weight": np.repeat(weight, len(kinds), axis=0).reshape(-1),
            "passed": np.tile(outcomes["passed"].to_numpy(dtype=bool), len(kinds) * runs),
        },
        copy=False,
    )


def _definition(kind: str, rows: pd.DataFrame, needing: int, total: int) -> str:
    """Two or three sentences, from the names and details of the checks."""
    names = [str(name) for name in rows["name"].value_counts().index[:3]] if "name" in rows else []
    checked = f" by the checks {', '.join(repr(name) for name in names)}" if names else ""
    text = (
        f"{kind.replace('_', ' ').capitalize()}: needed in {needing} of {total} trajectories, judged{checked}. "
        "It is shown when all of its required checks pass, and lacking when any fails."
    )
    if "detail" not in rows:
        return text
    details = rows.loc[~rows["passed"].astype(bool), "detail"].astype(str)
    common = details[details != ""].value_counts()
    if len(common):
        text += f" Most often it fails like this ({int(common.iloc[0])} times): {common.index[0]}"
    return text
