"""Which class answers best around a task: means over neighbours, ties, and what was never tried."""

from __future__ import annotations

import numpy as np

from models.router.solved import UNKNOWN, best_answers

BASE, FIRST, SECOND = 0, 1, 2


def around(angle: float, count: int = 8, spread: float = 0.05) -> np.ndarray:
    """Vectors that lie close together on a circle."""
    angles = angle + spread * np.linspace(-1, 1, count)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def answers(successes: np.ndarray, queries: np.ndarray | None = None) -> list[int]:
    """Of three groups of eight tasks, or of `queries` among them."""
    vectors = np.concatenate([around(0.0), around(2.1), around(4.2)])
    return list(best_answers(vectors if queries is None else queries, vectors, successes))


def rates(*groups: tuple[float, float, float]) -> np.ndarray:
    """Three groups of eight tasks, each class with so many of eight successes in each."""
    return np.concatenate(
        [np.stack([np.roll(np.arange(8) < 8 * rate, k) for k, rate in enumerate(group)], axis=1) for group in groups]
    ).astype(float)


def test_the_class_that_solves_most_around_a_task_answers_all_of_them() -> None:
    """One success more or less on the task itself decides nothing."""
    found = answers(rates((0.125, 0.75, 0.25), (0.0, 0.25, 0.875), (0.5, 0.875, 0.0)))
    assert found == [FIRST] * 8 + [SECOND] * 8 + [FIRST] * 8


def test_of_equals_the_one_that_solves_more_of_all_tasks_answers_and_else_the_base() -> None:
    assert answers(rates((1, 1, 1), (1, 0.5, 1), (1, 0, 0))) == [BASE] * 24
    assert answers(rates((1, 1, 1), (0, 0, 1), (0, 1, 0.5))) == [SECOND] * 16 + [FIRST] * 8
    assert answers(rates((1, 1, 0), (1, 1, 0), (0, 0, 1))) == [BASE] * 16 + [SECOND] * 8


def test_a_few_tasks_more_around_it_outweigh_all_others() -> None:
    assert answers(rates((0.875, 0.5, 0), (0, 1, 0), (0, 1, 0)))[:8] == [BASE] * 8


def test_nothing_is_said_where_nothing_succeeds() -> None:
    assert answers(rates((0, 0, 0), (0, 0, 1), (1, 0, 0))) == [UNKNOWN] * 8 + [SECOND] * 8 + [BASE] * 8


def test_a_class_that_hardly_played_is_not_believed() -> None:
    successes = rates((0.5, 0, 0), (0.5, 0, 0), (0.5, 0, 0))
    successes[:8, FIRST] = np.nan
    successes[3:5, FIRST] = 1.0  # two of eight, both solved
    successes[8:16, SECOND] = np.nan
    successes[8:14, SECOND] = 1.0
    assert answers(successes) == [BASE] * 8 + [SECOND] * 8 + [BASE] * 8


def test_a_task_that_was_not_played_is_answered_as_those_near_it() -> None:
    successes = rates((0, 1, 0), (1, 0, 0), (0, 0, 1))
    assert answers(successes, np.concatenate([around(4.2, 1), around(2.15, 1), around(0.02, 1)])) == [
        SECOND,
        BASE,
        FIRST,
    ]


def test_what_has_solved_a_task_keeps_it_unless_another_solves_more_around_it() -> None:
    vectors = np.concatenate([around(0.0), around(2.1), around(4.2)])
    queries = np.concatenate([around(0.01, 1), around(2.11, 1), around(4.21, 1), around(0.02, 1)])
    successes = rates((0, 1, 1), (0, 0.5, 1), (0, 0, 0))
    own = np.array([FIRST, FIRST, FIRST, UNKNOWN])
    assert list(best_answers(queries, vectors, successes, own)) == [FIRST, SECOND, FIRST, SECOND]
