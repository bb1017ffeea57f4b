"""Pairs of episodes counted once by task, so that any selection of families costs a mask and not another pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

from tasks.measuring.statistics import (
    Floats,
    PairedDifference,
    difference_of,
    finished_differences,
    mde_of,
    means_of,
    task_counts,
)

COLUMNS = ("task", "family", "base", "other")


@dataclass(frozen=True)
class PairedTasks:
    """The tasks of a pair: family (G,), successes and finished trials of each side (G,) each, and rows (G,)."""

    families: npt.NDArray[np.object_]
    base: tuple[Floats, Floats]
    other: tuple[Floats, Floats]
    rows: Floats

    @classmethod
    def of(cls, name: str, pair: pd.DataFrame) -> PairedTasks:
        """From a frame with one row per task and trial: task, family, base, other (outcomes in [0, 1], NaN where
        errored). A task has one family, that of its first row. ValueError, with `name`, for a column that is missing
        and for outcomes out of range."""
        missing = [c for c in COLUMNS if c not in pair.columns]
        if missing:
            raise ValueError(f"{name} has no column {', '.join(missing)}; pairs need {', '.join(COLUMNS)}")
        tasks = pair["task"].to_numpy()
        base, other = task_counts(pair["base"].to_numpy(), pair["other"].to_numpy(), tasks)
        first = ~pd.Series(tasks).duplicated().to_numpy()
        rows = np.bincount(pd.factorize(tasks)[0]).astype(np.float64)
        return cls(pair["family"].to_numpy(dtype=object)[first], base, other, rows)

    @property
    def names(self) -> set[str]:
        return set(self.families.tolist())

    def of_families(self, names: Collection[str]) -> PairedTasks:
        kept = np.isin(self.families, list(names))
        base, other = ((successes[kept], trials[kept]) for successes, trials in (self.base, self.other))
        return PairedTasks(self.families[kept], base, other, self.rows[kept])

    def difference(self, confidence: float = 0.95) -> PairedDifference | None:
        """The paired difference, None when both sides finished no task."""
        differences, left_out = self._differences()
        return difference_of(differences, left_out, confidence) if len(differences) else None

    def lost(self) -> tuple[float, float]:
        """How many tasks each side lost; one of which it finished some trials counts in part. Of a frame that has a row
        for each task and trial, with both sides in it."""
        base, other = (float((1 - trials / self.rows).sum()) for _, trials in (self.base, self.other))
        return base, other

    def mde(self, alpha: float) -> float:
        """The minimum detectable effect in points, at `alpha` with 80 % power."""
        return mde_of(self._differences()[0], alpha=alpha)

    def pass_k(self, k: int, confidence: float = 0.95) -> PairedDifference | None:
        """The difference of pass^k, None when no task has k finished trials on both sides; outcomes must be 0 or 1."""
        differences, left_out = finished_differences(pass_k_of(*self.base, k), pass_k_of(*self.other, k))
        return difference_of(differences, left_out, confidence) if len(differences) else None

    def _differences(self) -> tuple[Floats, int]:
        return finished_differences(means_of(*self.base), means_of(*self.other))


def pass_k_of(successes: Floats, trials: Floats, k: int) -> Floats:
    """pass^k by task, the chance that k trials all succeed: C(c, k) / C(n, k) for c successes in n finished trials,
    which is unbiased (Yao et al., 2024, tau-bench, arXiv 2406.12045). NaN where n < k. ValueError for k below 1 and for
    outcomes that are neither 0 nor 1."""
    if k < 1:
        raise ValueError(f"pass^k needs k of at least 1, got {k!r}")
    if np.any(successes != np.round(successes)):
        raise ValueError("pass^k needs outcomes that are 0 or 1 (NaN for an episode that errored)")
    ways = special.comb(trials, k)
    return np.divide(special.comb(successes, k), ways, out=np.full(len(ways), np.nan), where=ways > 0)
