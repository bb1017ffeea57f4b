"""How far labelling runs agree: Fleiss' kappa."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from tasks.mining.labels import LABELS


@dataclass(frozen=True)
class Agreement:
    """Fleiss' kappa. `kappa` and an entry of `by_category` are None where they are undefined (see `fleiss_kappa`);
    `observed` is the share of agreeing pairs of ratings, in [0, 1], and always defined."""

    kappa: float | None
    by_category: tuple[float | None, ...]
    observed: float


def fleiss_kappa(counts: npt.ArrayLike, sets: Sequence[Sequence[int]] | None = None) -> Agreement:
    """Fleiss' kappa (1971, Psychological Bulletin 76) of `counts` (items, categories): how many raters chose each.

    Every item needs the same number of raters, at least 2 (ValueError). `sets` merges columns first: ((0,), (1, 2))
    asks whether raters agree on category 0 against the rest. When all ratings fall in one category, chance agreement
    is 1 and kappa is 0/0: it is None then, not 1, because raters who never had a reason to disagree have shown nothing;
    `observed` is 1. A category of which that holds (all or none of the ratings) is None in `by_category`."""
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"counts must be (items, categories), got shape {table.shape}")
    if sets is not None:
        table = np.stack([table[:, list(columns)].sum(axis=1) for columns in sets], axis=1)
    raters = float(table[0].sum())
    if raters < 2 or np.any(table < 0) or np.any(table.sum(axis=1) != raters):
        raise ValueError(
            f"every item needs the same number of ratings, at least 2; rows sum to {table.sum(axis=1)[:8]}"
        )
    pairs = raters * (raters - 1)
    share = table.sum(axis=0) / table.sum()
    observed = float(np.mean((table * (table - 1)).sum(axis=1) / pairs))
    chance = float((share**2).sum())
    disagree = (table * (raters - table)).mean(axis=0) / pairs
    by_category = tuple(
        None if q in (0.0, 1.0) else float(1 - d / (q * (1 - q))) for d, q in zip(disagree, share, strict=True)
    )
    return Agreement(None if np.any(share == 1.0) else (observed - chance) / (1 - chance), by_category, observed)


def agreement(labels: pd.DataFrame) -> tuple[float | None, dict[str, float | None]]:
    """Kappa over the capabilities that every run labels, and per capability over the runs that label it; runs are the
    raters. None where it is undefined, as with one run alone."""
    capability, names = pd.factorize(labels["capability"])
    trajectory, ids = pd.factorize(labels["trajectory_id"])
    code = pd.Categorical(labels["label"], categories=list(LABELS)).codes.astype(np.int64)
    size = len(names) * len(ids) * len(LABELS)
    cells = np.bincount((capability * len(ids) + trajectory) * len(LABELS) + code, minlength=size)
    counts = cells.reshape(len(names), len(ids), len(LABELS))
    raters = labels["run"].groupby(capability).nunique()
    by_name: dict[str, float | None] = {}
    complete = []
    for i, name in enumerate(map(str, names)):
        labelled = counts[i][counts[i].sum(axis=1) > 0]
        by_name[name] = fleiss_kappa(labelled).kappa if raters[i] > 1 else None
        if raters[i] == labels["run"].nunique() > 1:
            complete.append(labelled)
    return fleiss_kappa(np.concatenate(complete)).kappa if complete else None, by_name
