"""Which class answers a task best, by what solved the tasks that are most like it.

One episode a task says little. What lies near it in the base model's hidden states is asked in much the same way, so
the mean over the task and its nearest others says more, and tasks that were never played get an answer too.
"""

from __future__ import annotations

import numpy as np

from models.router.router import nearest_columns, unit

# Tasks that speak for one, itself among them: a family of the shop has eight in a round's diagnosis.
NEIGHBOURS = 7
# Fewest of them on which a class was tried, for its mean to count.
LEAST = 3
UNKNOWN = -1


def best_answers(
    queries: np.ndarray, vectors: np.ndarray, successes: np.ndarray, neighbours: int = NEIGHBOURS
) -> np.ndarray:
    """(m,) the column of the class that solves most around each query, `UNKNOWN` where none solves anything.

    `queries` (m, d) and `vectors` (n, d) are embeddings of the same kind; `successes` (n, classes) are shares of
    success in [0, 1], NaN where a class did not play a task. Of equal classes the first is taken, so the base stands
    first: no adapter answers what the base answers as well.
    """
    centre = vectors.mean(axis=0)
    similarity = unit(queries - centre) @ unit(vectors - centre).T
    nearest = nearest_columns(similarity, neighbours)
    around = successes[nearest]  # (m, neighbours, classes)
    known = ~np.isnan(around)
    counts = known.sum(axis=1)
    least = min(LEAST, nearest.shape[1])
    means = np.where(known, around, 0.0).sum(axis=1) / np.maximum(1, counts)
    means = np.where(counts >= least, means, 0.0)
    best = means.argmax(axis=1)
    return np.where(means.max(axis=1) > 0, best, UNKNOWN)
