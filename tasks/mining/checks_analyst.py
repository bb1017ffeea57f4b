"""The analyst without a model: candidates and labels from the verifier's own checks.

Checks may be one frame, or frames one after another (`Store.check_frames`), which never lie in memory together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from errors import LabelError
from tasks.mining.label_matrix import LabelMatrix
from tasks.mining.labels import LABELS, LACKING, NA, PRESENT

Checks: TypeAlias = pd.DataFrame | Iterable[pd.DataFrame]


@dataclass(frozen=True)
class Candidate:
    """A capability found in the checks. `coverage` is the share of failed trajectories that lack it, in [0, 1]."""

    name: str
    definition: str
    coverage: float
    failed_examples: tuple[str, ...]
    passed_examples: tuple[str, ...]


def discover_candidates(checks: Checks, outcomes: pd.DataFrame, limit: int = 10) -> tuple[Candidate, ...]:
    """Candidate capabilities from the verifier's checks: the kinds that most failed trajectories lack, at most `limit`.

    `checks` has trajectory_id, name, kind, required, passed, detail; `outcomes` has trajectory_id and passed. A kind
    that no failed trajectory lacks is no candidate. Order: coverage descending, ties by name."""
    wording = _Wording()
    read = _read(checks, outcomes, wording)
    passed = outcomes["passed"].to_numpy(dtype=bool)
    found = []
    for kind, labels in zip(read.kinds, read.label, strict=True):
        lost = (labels == LABELS.index(LACKING)) & ~passed
        if not lost.any():
            continue
        needing = int((labels != LABELS.index(NA)).sum())
        shown = (labels == LABELS.index(PRESENT)) & passed
        found.append(
            Candidate(
                name=kind,
                definition=wording.definition(kind, needing, len(passed)),
                coverage=int(lost.sum()) / int((~passed).sum()),
                failed_examples=tuple(nsmallest(3, map(str, read.ids[lost]))),
                passed_examples=tuple(nsmallest(3, map(str, read.ids[shown]))),
            )
        )
    return tuple(sorted(found, key=lambda c: (-c.coverage, c.name))[:limit])


def label_matrix(checks: Checks, outcomes: pd.DataFrame, runs: int = 10, seed: int = 0) -> LabelMatrix:
    """The `checks` analyst: labels from required checks, N runs as bootstrap resamples, ready for `select`.

    `checks` has trajectory_id, kind, required, passed; `outcomes` has trajectory_id, task_id, passed, one row a
    trajectory. Label of a pair: no required check of the kind = NA, all required ones passed = PRESENT, any failed =
    LACKING.

    A run draws *tasks* with replacement and gives each trajectory its task's number of draws as `weight` (0 when
    undrawn, so that every run still holds every pair). Trials of one task are near copies; drawing trajectories one by
    one would make ten runs agree that rest on two tasks. Draws are not stratified: by outcome would fix the share of
    failures, which is part of what varies, and by family would use a truth that analysts do not see."""
    read = _read(checks, outcomes)
    task, tasks = pd.factorize(outcomes["task_id"].astype(object))
    draws = np.random.default_rng(seed).multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), size=runs)
    weight = draws.astype(np.int16)[:, task]
    return LabelMatrix(
        pd.Index(read.kinds, dtype=object), read.ids, read.label, weight, outcomes["passed"].to_numpy(dtype=bool)
    )


def bootstrap_labels(checks: Checks, outcomes: pd.DataFrame, runs: int = 10, seed: int = 0) -> pd.DataFrame:
    """`label_matrix` as a frame with one row a label, as the store keeps them."""
    return label_matrix(checks, outcomes, runs, seed).frame()


@dataclass
class _Wording:
    """Names of required checks and details of failed ones by kind: what definitions are written from."""

    names: dict[str, Counter[str]] = field(default_factory=dict)
    details: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, needed: pd.DataFrame) -> None:
        """Count a frame of required checks."""
        failed = needed[~needed["passed"].astype(bool)]
        for column, rows, into in (("name", needed, self.names), ("detail", failed, self.details)):
            if column in rows:
                counted = rows.groupby(["kind", column], sort=False, observed=True).size()
                for (kind, text), times in counted.items():
                    into.setdefault(str(kind), Counter())[str(text)] += int(times)

    def definition(self, kind: str, needing: int, total: int) -> str:
        """Two or three sentences."""
        names = [name for name, _ in self.names.get(kind, Counter()).most_common(3)]
        checked = f" by the checks {', '.join(repr(name) for name in names)}" if names else ""
        text = (
            f"{kind.replace('_', ' ').capitalize()}: needed in {needing} of {total} trajectories, judged{checked}. "
            "It is shown when all of its required checks pass, and lacking when any fails."
        )
        common = [(detail, times) for detail, times in self.details.get(kind, Counter()).most_common(2) if detail]
        if common:
            text += f" Most often it fails like this ({common[0][1]} times): {common[0][0]}"
        return text


@dataclass(frozen=True)
class _Labels:
    """Kinds in order of their names, and their labels [kinds, trajectories] as places in LABELS."""

    kinds: list[str]
    ids: pd.Index
    label: npt.NDArray[np.int8]


def _read(checks: Checks, outcomes: pd.DataFrame, wording: _Wording | None = None) -> _Labels:
    """One pass over the checks. A trajectory's checks may be in different frames."""
    if outcomes["trajectory_id"].duplicated().any() or outcomes.empty:
        raise LabelError(f"outcomes must hold each trajectory once, got {len(outcomes)} rows with repeats or none")
    ids = pd.Index(outcomes["trajectory_id"].astype(object))
    rows: dict[str, npt.NDArray[np.int8]] = {}
    for frame in _frames(checks):
        trajectory = ids.get_indexer(pd.Index(frame["trajectory_id"].astype(object)))
        if (trajectory < 0).any():
            stray = frame["trajectory_id"].iloc[int(np.argmax(trajectory < 0))]
            raise LabelError(f"checks name trajectory {stray!r}, which has no outcome; give both from one round")
        kind, kinds = pd.factorize(frame["kind"].astype(object))
        required = frame["required"].to_numpy(dtype=bool)
        failed = required & ~frame["passed"].to_numpy(dtype=bool)
        for place, name in enumerate(map(str, kinds)):
            row = rows.setdefault(name, np.zeros(len(ids), dtype=np.int8))
            mine = kind == place
            needed = trajectory[mine & required]
            row[needed] = np.maximum(row[needed], LABELS.index(PRESENT))
            row[trajectory[mine & failed]] = LABELS.index(LACKING)
        if wording is not None:
            wording.add(frame[required])
    label = np.stack([rows[kind] for kind in sorted(rows)]) if rows else np.zeros((0, len(ids)), dtype=np.int8)
    return _Labels(sorted(rows), ids, label)


def _frames(checks: Checks) -> Iterator[pd.DataFrame]:
    return iter([checks]) if isinstance(checks, pd.DataFrame) else iter(checks)
