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
# Of how many tasks around it a class's share of all tasks counts as much: of two that solve the same around a task, the
# one that solves more of all tasks answers it. Always the base there was tried, and one adapter for everything beat it.
PRIOR = 1.0
UNKNOWN = -1


def best_answers(
    queries: np.ndarray,
    vectors: np.ndarray,
    successes: np.ndarray,
    own: np.ndarray | None = None,
    neighbours: int = NEIGHBOURS,
) -> np.ndarray:
    """(m,) the column of the class that solves most around each query, `UNKNOWN` where none solves anything.

    `queries` (m, d) and `vectors` (n, d) are embeddings of the same kind; `successes` (n, classes) are shares of
    success in [0, 1], NaN where a class did not play a task. A class counts by its mean around the query, drawn
    a little towards its mean over all tasks (`PRIOR`); of equal classes the first is taken, so the base stands first.
    `own` (m,) is the column of what has solved a query, `UNKNOWN` where that is not known: it keeps the query unless
    another solves more of the tasks around it.
    """
    centre = vectors.mean(axis=0)
    similarity = unit(queries - centre) @ unit(vectors - centre).T
    nearest = nearest_columns(similarity, neighbours)
    around = successes[nearest]  # (m, neighbours, classes)
    known = ~np.isnan(around)
    counts = known.sum(axis=1)
    least = min(LEAST, nearest.shape[1])
    tried = ~np.isnan(successes)
    overall = np.where(tried, successes, 0.0).sum(axis=0) / np.maximum(1, tried.sum(axis=0))
    solved = np.where(counts >= least, np.where(known, around, 0.0).sum(axis=1), 0.0)
    drawn = np.where(counts >= least, (solved + PRIOR * overall) / (counts + PRIOR), -1.0)
    best = np.where(solved.max(axis=1) > 0, drawn.argmax(axis=1), UNKNOWN)
    if own is None:
        return best
    means = np.where(counts >= least, solved / np.maximum(1, counts), 0.0)
    mine = np.take_along_axis(means, np.maximum(0, own)[:, None], axis=1)[:, 0]
    return np.where((own != UNKNOWN) & (mine >= means.max(axis=1)), own, best)
