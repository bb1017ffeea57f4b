"""Stage 3 of the method: the selection of capabilities by coverage and contrast over N labelling runs.

Tables are pandas frames; ids and names may be strings or categoricals. Categoricals take much less memory for large
tables (100,000 trajectories x 20 capabilities x 10 runs are 20 million rows). Where all runs give the same labels, as
from verifier's checks, a `LabelMatrix` takes a tenth of the place, and a million trajectories fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from errors import LabelError
from tasks.mining.label_matrix import LabelMatrix
from tasks.mining.labels import LABELS, LACKING

EVIDENCE = 10
_CHUNK = 2_000_000  # rows counted at once: bounds the temporaries to tens of megabytes
NOTHING = "no labels: there is nothing to select from; run an analyst first"
WEIGHTS = "weights must be finite and at least 0 (how often the trajectory counts in the run)"
_TOLERANCE = 1e-9  # 0.7 - 0.5 is 0.19999999999999996 and must pass an inclusive threshold of 0.2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CapabilitySelection:
    """One row of the selection. Means and population standard deviations are over the `runs_seen` runs that label the
    capability. `evidence` holds (failed trajectory id, number of runs that called it LACKING), most votes first."""

    name: str
    selected: bool
    runs_passed: int
    runs_seen: int
    mean_cov: float
    std_cov: float
    mean_delta: float
    std_delta: float
    mean_er_failed: float
    mean_er_passed: float
    evidence: tuple[tuple[str, int], ...]
    reason: str


def select(
    labels: pd.DataFrame | LabelMatrix, rho: float = 0.10, delta: float = 0.20, k: int = 8, n: int = 10
) -> tuple[CapabilitySelection, ...]:
    """Selects capabilities by coverage and contrast (method, section 3); all are returned, `selected` tells.

    `labels` is a `LabelMatrix`, or has the columns run, trajectory_id, capability, label (NA, PRESENT, LACKING), weight
    (how often the trajectory counts in the run, >= 0) and passed (bool). Order: mean Delta descending, then mean
    coverage descending, then name. A run that lacks a capability counts as not passed and is left out of its means.
    Votes count a run's label once, with any weight. Raises LabelError when a run does not label every pair of a
    trajectory and a capability once, or there are more than `n` runs."""
    counted = _count_matrix(labels) if isinstance(labels, LabelMatrix) else _count_table(_encode(labels))
    cells, seen = counted.cells, counted.seen
    if len(cells) > n:
        raise LabelError(f"{len(cells)} labelling runs were given but N is {n}; pass the N that was run")
    lacking_count, present = cells[:, :, 2, :], cells[:, :, 1, :]
    cov = _ratio(lacking_count[:, :, 0], cells[:, :, :, 0].sum(axis=2))
    er = _ratio(lacking_count, lacking_count + present)
    contrast = er[:, :, 0] - er[:, :, 1]
    ok = seen & (cov >= rho - _TOLERANCE) & (contrast >= delta - _TOLERANCE)

    result = []
    for c, name in enumerate(counted.capabilities):
        used, passes = seen[:, c], int(ok[:, c].sum())
        cov_c, contrast_c, er_c = cov[used, c], contrast[used, c], er[used, c]
        mean_cov, mean_delta = float(cov_c.mean()), float(contrast_c.mean())
        result.append(
            CapabilitySelection(
                name=str(name),
                selected=passes >= k,
                runs_passed=passes,
                runs_seen=int(used.sum()),
                mean_cov=mean_cov,
                std_cov=float(cov_c.std()),
                mean_delta=mean_delta,
                std_delta=float(contrast_c.std()),
                mean_er_failed=float(er_c[:, 0].mean()),
                mean_er_passed=float(er_c[:, 1].mean()),
                evidence=_evidence(counted.votes(c), counted.trajectories),
                reason=f"{passes} of {n} runs reach coverage {rho:g} and contrast {delta:g} ({k} needed); "
                f"means {mean_cov:.3f} and {mean_delta:.3f}.",
            )
        )
    return tuple(sorted(result, key=lambda row: (-round(row.mean_delta, 12), -round(row.mean_cov, 12), row.name)))


@dataclass(frozen=True)
class _Counted:
    """What the rule reads: `cells` are weighted trajectories [run, capability, NA/PRESENT/LACKING, failed/passed],
    `seen` (runs, capabilities) says who labelled what, and `votes` gives a capability's votes by trajectory."""

    capabilities: pd.Index
    trajectories: pd.Index
    cells: Floats
    seen: npt.NDArray[np.bool_]
    votes: Callable[[int], npt.NDArray[np.int32]]


def _count_matrix(matrix: LabelMatrix) -> _Counted:
    if not matrix.pairs or not matrix.runs:
        raise LabelError(NOTHING)
    if (matrix.weight < 0).any():
        raise LabelError(WEIGHTS)

    def votes(capability: int) -> npt.NDArray[np.int32]:
        lacking = (matrix.label[capability] == LABELS.index(LACKING)) & ~matrix.passed
        return lacking.astype(np.int32) * matrix.runs

    seen = np.ones((matrix.runs, len(matrix.capabilities)), dtype=bool)
    return _Counted(matrix.capabilities, matrix.trajectories, matrix.counts(), seen, votes)


def _count_table(table: _Table) -> _Counted:
    runs, names, ids = len(table.runs), len(table.capabilities), len(table.trajectories)
    counts = np.zeros(runs * names * 6)
    votes = np.zeros(names * ids, dtype=np.int32)
    for rows in _chunks(len(table.label)):
        passed = table.passed[table.trajectory[rows]]
        label, capability = table.label[rows].astype(np.intp), table.capability[rows].astype(np.intp)
        cell = (table.run[rows].astype(np.intp) * names + capability) * 6 + label * 2 + passed
        counts += np.bincount(cell, weights=table.weight[rows], minlength=len(counts))
        lacking = (label == LABELS.index(LACKING)) & ~passed
        keys = capability[lacking] * ids + table.trajectory[rows][lacking]
        votes += np.bincount(keys, minlength=len(votes)).astype(np.int32)
    cells = counts.reshape(runs, names, 3, 2)
    return _Counted(table.capabilities, table.trajectories, cells, table.seen, lambda c: votes[c * ids : (c + 1) * ids])


@dataclass(frozen=True)
class _Table:
    """The label table as integer codes; `passed` is by trajectory, `seen` (runs, capabilities) says who labelled
    what."""

    runs: pd.Index
    trajectories: pd.Index
    capabilities: pd.Index
    run: npt.NDArray[Any]
    trajectory: npt.NDArray[Any]
    capability: npt.NDArray[Any]
    label: npt.NDArray[np.int8]
    weight: npt.NDArray[Any]
    passed: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.bool_]


def _encode(labels: pd.DataFrame) -> _Table:
    if labels.empty:
        raise LabelError(NOTHING)
    run, runs = _codes(labels["run"])
    trajectory, trajectories = _codes(labels["trajectory_id"])
    capability, capabilities = _codes(labels["capability"])
    given, names = _codes(labels["label"])
    unknown = [str(name) for name in names if name not in LABELS]
    if unknown:
        raise LabelError(f"unknown label {unknown[0]!r}; allowed are {', '.join(LABELS)}")
    label = np.array([LABELS.index(str(name)) for name in names], dtype=np.int8)[given]
    weight = labels["weight"].to_numpy()
    if not np.all(np.isfinite(weight)) or np.any(weight < 0):
        raise LabelError(WEIGHTS)
    passed, seen = _check_partition(labels, (run, capability, trajectory), (runs, capabilities, trajectories))
    return _Table(runs, trajectories, capabilities, run, trajectory, capability, label, weight, passed, seen)


def _check_partition(
    labels: pd.DataFrame, codes: tuple[Any, Any, Any], names: tuple[pd.Index, pd.Index, pd.Index]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Every pair once per run that labels the capability, one outcome per trajectory; (passed, seen) or LabelError."""
    run, capability, trajectory = codes
    runs, capabilities, trajectories = (len(index) for index in names)
    outcome = labels["passed"].to_numpy(dtype=bool)
    passed = np.zeros(trajectories, dtype=bool)
    passed[trajectory] = outcome
    marked = np.zeros(runs * capabilities * trajectories, dtype=bool)
    for rows in _chunks(len(run)):
        if np.any(passed[trajectory[rows]] != outcome[rows]):
            at = int(np.argmax(passed[trajectory[rows]] != outcome[rows]))
            raise LabelError(f"trajectory {names[2][trajectory[rows][at]]!r} is called both passed and failed")
        key = (run[rows].astype(np.intp) * capabilities + capability[rows]) * trajectories + trajectory[rows]
        marked[key] = True
    grid = marked.reshape(runs, capabilities, trajectories)
    if int(grid.sum()) != len(run):
        twice = labels[labels.duplicated(["run", "trajectory_id", "capability"])].iloc[0]
        raise LabelError(f"run {twice['run']!r} labels {twice['trajectory_id']!r} twice for {twice['capability']!r}")
    per_pair = grid.sum(axis=2)
    seen = per_pair > 0
    gaps = seen & (per_pair < trajectories)
    if gaps.any():
        r, c = (int(i[0]) for i in np.nonzero(gaps))
        t = int(np.argmin(grid[r, c]))
        raise LabelError(
            f"run {names[0][r]!r} has no label for {int(trajectories - per_pair[r, c])} trajectories "
            f"on {names[1][c]!r}, first {names[2][t]!r}; label every pair once or leave the capability out of the run"
        )
    return passed, seen


def _codes(column: pd.Series) -> tuple[npt.NDArray[Any], pd.Index]:
    """Integer codes and the values they stand for; a missing value is an error."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes, values = column.cat.codes.to_numpy(), column.cat.categories
        used = np.zeros(len(values) + 1, dtype=bool)
        used[codes] = True  # a missing value is -1 and marks the last place
        if not used[:-1].all():
            return _codes(column.cat.remove_unused_categories())
    else:
        codes, values = pd.factorize(column)
        values = pd.Index(values)
    if len(codes) and int(codes.min()) < 0:
        raise LabelError(
            f"column {column.name!r} has missing values; every pair needs one (write 'NA' for not required)"
        )
    return codes, values


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK))


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _evidence(votes: npt.NDArray[np.int32], ids: pd.Index) -> tuple[tuple[str, int], ...]:
    voted = np.nonzero(votes)[0]
    if len(voted) > 10 * EVIDENCE:  # ids are sorted as text only among those that can still be in
        least = np.partition(votes[voted], len(voted) - EVIDENCE)[len(voted) - EVIDENCE]
        voted = voted[votes[voted] >= least]
    ranked = sorted(((str(ids[int(i)]), int(votes[i])) for i in voted), key=lambda row: (-row[1], row[0]))
    return tuple(ranked[:EVIDENCE])
