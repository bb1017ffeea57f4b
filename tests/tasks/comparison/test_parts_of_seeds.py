"""A comparison in which a method lacks seeds that another has: the table says which its figures are over."""

from __future__ import annotations

import pytest

from tasks.comparison.page import lines, render
from tasks.comparison.results import SeedResult
from tasks.comparison.table import table_of
from tests.tasks.comparison.seed_files import TASKS, figures, seed_result


def results(all_of_them: bool) -> list[SeedResult]:
    """TRACE on three seeds, of which it does well on the first two; GEPA on these, or on all."""
    found = [seed_result(s, {"trace": figures(12), "gepa": figures(12)}) for s in (7, 8)]
    third = {"trace": figures(0), "gepa": figures(12)}
    return [*found, seed_result(9, third if all_of_them else {"trace": third["trace"]})]


def test_points_that_are_no_difference_of_the_rates_beside_them_are_explained() -> None:
    table = table_of(results(all_of_them=False))
    trace, gepa = table.rows
    assert gepa.difference is not None
    assert (gepa.difference.points, gepa.difference.seeds) == (0.0, 2)
    assert 100 * (gepa.success - trace.success) == pytest.approx(100 * 4 / TASKS)
    said = "gepa: points are over the 2 seeds that it and TRACE have."
    assert said in render(table, results(all_of_them=False))
    assert said in lines(table)


def test_nothing_is_said_where_all_have_the_same_seeds() -> None:
    table = table_of(results(all_of_them=True))
    assert "points are over" not in render(table, results(all_of_them=True)) + "\n".join(lines(table))


def test_a_method_that_lost_every_episode_has_no_rate() -> None:
    played = [seed_result(7, {"trace": figures(12), "gepa": figures(0, lost=TASKS)})]
    table = table_of(played)
    assert "nan" not in "\n".join(lines(table))
    assert "nan" not in render(table, played)
