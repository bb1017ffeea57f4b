"""The table over seeds: means, intervals and differences that a hand can check, costs, families, curves, pages."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from errors import ConfigurationError
from tasks.comparison.page import lines, render
from tasks.comparison.results import SeedResult
from tasks.comparison.table import MethodRow, Table, estimate, table_of
from tasks.measuring.statistics import clustered_interval, paired_difference
from tasks.reporting.charts import lettered
from tests.tasks.comparison.seed_files import TASKS, figures, nested, seed_result

METHODS = {"base": (4, 5, 3), "examples": (8, 8, 9), "trace": (12, 13, 12)}


def three_seeds() -> list[SeedResult]:
    return [
        seed_result(7 + s, {n: figures(solved[s], seconds=10.0 * (s + 1)) for n, solved in METHODS.items()})
        for s in range(3)
    ]


def rows_of(table: Table) -> dict[str, MethodRow]:
    return {row.name: row for row in table.rows}


def test_means_differences_and_costs() -> None:
    rows = rows_of(table_of(three_seeds()))
    assert list(rows) == list(METHODS)
    for name, solved in METHODS.items():
        assert rows[name].success == pytest.approx(sum(solved) / (3 * TASKS))
        assert rows[name].low < rows[name].success < rows[name].high
        assert (rows[name].seeds, rows[name].episodes, rows[name].tokens) == (3, 100, 1000)
        assert (rows[name].seconds, rows[name].dollars) == (20.0, 0.25)
    assert rows["trace"].difference is None
    base, examples = rows["base"].difference, rows["examples"].difference
    assert base is not None
    assert examples is not None
    assert base.points == pytest.approx(100 * (12 - 37) / (3 * TASKS))
    assert base.low < base.points < base.high < 0
    assert base.p < examples.p, "the larger difference is the surer one"
    assert base.p < 0.06, "after Holm"


def test_the_p_value_is_after_holm_and_no_difference_is_none() -> None:
    alone = table_of([seed_result(s, {"base": figures(4), "trace": figures(12)}) for s in (7, 8)])
    more = table_of(
        [
            seed_result(s, {"base": figures(4), "noop": figures(12), "trace": figures(12), "single": figures(12)})
            for s in (7, 8)
        ]
    )
    first, second = rows_of(alone)["base"].difference, rows_of(more)["base"].difference
    assert first is not None
    assert second is not None
    assert second.p == pytest.approx(3 * first.p)
    same = rows_of(more)["noop"].difference
    assert same is not None
    assert (same.points, same.p) == (0, 1)
    assert same.low == -same.high < 0, "of a few tasks that agree"


def test_intervals_are_students_over_the_seeds_means() -> None:
    """Worked by hand: means 0.2, 0.5, 0.8, so 0.5 with an error of 0.3 / sqrt(3) and 2 degrees of freedom."""
    found = estimate([np.full(10, v) for v in (0.2, 0.5, 0.8)])
    assert (found.mean, found.high - found.mean) == (pytest.approx(0.5), pytest.approx(4.302653 * 0.3 / 3**0.5))
    assert found.p == pytest.approx(0.1019, abs=1e-3)
    # Seeds that agree by chance are not known better than their tasks: 4 of 16 each, with one more of either outcome
    # 5 of 18, whose mean has an error of 0.108633.
    alike = estimate([np.array([1.0] * 4 + [0.0] * 12)] * 3, shares=True)
    assert alike.high - alike.mean == pytest.approx(4.302653 * 0.108633 / 3**0.5, rel=1e-4)
    assert (estimate([np.zeros(9)] * 3).p, estimate([np.zeros(9)] * 3).mean) == (1.0, 0.0)
    assert math.isnan(estimate([np.full(3, np.nan)]).mean)


def test_of_one_seed_intervals_and_p_are_those_over_its_tasks() -> None:
    mixed = np.array([1.0] * 4 + [0.0] * 12)
    share, within = estimate([mixed], shares=True), clustered_interval(mixed, range(16))
    assert (share.mean, share.low, share.high) == (0.25, within.low, within.high)
    change, found = estimate([mixed - mixed[::-1]]), paired_difference(mixed[::-1], mixed, range(16))
    assert (100 * change.low, 100 * change.high, change.p) == pytest.approx((found.low, found.high, found.p))


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_what_every_task_agrees_on_is_not_known_for_certain(seeds: int) -> None:
    share, gain = estimate([np.ones(8)] * seeds, shares=True), estimate([np.ones(8)] * seeds)
    assert share.low < share.mean == 1
    assert gain.low < gain.mean == 1
    assert 0 < gain.p < 0.1


@pytest.mark.parametrize(("seeds", "tasks", "rate"), [(1, 16, 0.95), (2, 24, 0.97), (3, 24, 0.97)])
def test_intervals_of_high_shares_hold_the_truth_as_often_as_they_say(seeds: int, tasks: int, rate: float) -> None:
    """Without the pseudo-tasks 56, 76 and 89 % of them did."""
    rng, held, runs = np.random.default_rng(0), 0, 600
    for _ in range(runs):
        found = estimate(list((rng.random((seeds, tasks)) < rate).astype(float)), shares=True)
        held += found.low <= rate <= min(1.0, found.high)
    assert held / runs >= 0.93


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_methods_are_rarely_called_different(seeds: int) -> None:
    """Also where their difference varies by 20 points from seed to seed: a bootstrap over seeds and tasks rejects 13 to
    27 % of such comparisons."""
    rng, rejected, runs = np.random.default_rng(seeds), 0, 400
    for _ in range(runs):
        shift = 0.2 * rng.standard_normal(seeds)
        values = [(rng.random(160) < 0.45 + s).astype(float) - (rng.random(160) < 0.45) for s in shift]
        rejected += estimate(values).p < 0.05
    assert rejected / runs <= 0.08


def test_seeds_with_tasks_of_their_own_stand_in_one_table() -> None:
    results = []
    for seed in (7, 8):
        made = seed_result(seed, {"base": figures(4), "trace": figures(12)}, drawn=True)
        mine = {f"{t}-{seed}": f for t, f in made.families.items()}
        methods = {
            name: m.model_copy(update={"outcomes": {f"{t}-{seed}": o for t, o in m.outcomes.items()}})
            for name, m in made.methods.items()
        }
        results.append(made.model_copy(update={"families": mine, "methods": methods}))
    rows = rows_of(table_of(results))
    assert rows["trace"].success == pytest.approx(12 / TASKS)
    assert rows["base"].difference is not None
    assert rows["base"].difference.points == pytest.approx(-100 * 8 / TASKS)
    fewer = {t: f for t, f in results[1].families.items() if f != "move"}
    with pytest.raises(ConfigurationError, match="another list of test tasks"):
        table_of([results[0], results[1].model_copy(update={"families": fewer})])
    with pytest.raises(ConfigurationError, match=r"another origin of its test tasks \(drawn for the seed, or fixed\)"):
        table_of([results[0], results[1].model_copy(update={"drawn": False})])


def test_a_method_is_compared_on_the_seeds_that_have_both_and_lost_tasks_are_left_out() -> None:
    results = [
        seed_result(7, {"trace": figures(12), "gepa": figures(6, lost=4)}),
        seed_result(8, {"trace": figures(24)}),
    ]
    rows = rows_of(table_of(results))
    assert rows["gepa"].success == pytest.approx(6 / 20)
    assert rows["gepa"].difference is not None
    assert rows["gepa"].difference.seeds == 1
    assert rows["gepa"].difference.points == pytest.approx(100 * (6 - 12) / 20)
    assert rows_of(table_of([seed_result(7, {"base": figures(3)})]))["base"].difference is None


def test_families_and_nested_capabilities() -> None:
    table = table_of(
        [
            seed_result(7, {"base": figures(3), "trace": figures(12, capabilities=nested(3, 6, 12))}),
            seed_result(8, {"base": figures(3), "trace": figures(9, capabilities=nested(3, 9))}),
        ]
    )
    assert table.families["cancel"]["base"] == pytest.approx(1 / 8)
    assert table.capabilities == (
        (0, pytest.approx(3 / TASKS), 2),
        (1, pytest.approx(7.5 / TASKS), 2),
        (2, pytest.approx(12 / TASKS), 1),
    )


def test_text_and_page_are_made_of_the_files_alone() -> None:
    methods = {
        "base": figures(4, notes=("<b>plain</b>",)),
        "mixed": figures(9, rollouts=nested(4, 9)),
        "trace": figures(12, capabilities=nested(4, 12)),
    }
    results = [seed_result(s, methods) for s in (7, 8)]
    table = table_of(results)
    text = "\n".join(lines(table))
    for said in (
        "seeds 7, 8",
        "budget 500",
        "base ",
        "trace ",
        "50.0 %",
        "-33.3",
        "cancel",
        "0: 16.7 % (2), 1: 50.0 %",
        "mixed by episodes: 0: 16.7 %, 1: 37.5 %",
    ):
        assert said in text, said
    page = render(table, results)
    assert page.count("<svg") == 3
    assert "&lt;b&gt;plain&lt;/b&gt;" in page
    assert "<script" not in page
    assert all(f"Seed {s}" in page for s in (7, 8))
    one = "\n".join(lines(table_of(results[:1])))
    assert "tasks alone (one seed)" in one
    with pytest.raises(ConfigurationError, match="no seed's file"):
        table_of([])


def test_more_methods_than_letters_are_drawn() -> None:
    assert [lettered(i) for i in (0, 25, 26, 27, 51, 52)] == ["A", "Z", "AA", "AB", "AZ", "BA"]
    results = [seed_result(7, {"trace": figures(12)})]
    few = table_of(results)
    many = replace(few, rows=few.rows * 31)
    assert "AE trace" in "\n".join(lines(many))
    assert "AE: trace" in render(many, results)


def test_the_shift_test_untouched_families_and_repeated_success() -> None:
    shift = {"s0": "other", "s1": "other"}

    def seed(number: int, trained: tuple[str, ...]) -> SeedResult:
        methods = {
            "base": figures(4, shift={"s0": [0.0, 0.0], "s1": [1.0, 0.0]}),
            "trace": figures(12, shift={"s0": [1.0, 1.0], "s1": [1.0, 0.0]}, trained=trained),
        }
        needs = {"cancel": ["stop"], "refund": ["pay"], "move": ["send", "pay"]}
        return seed_result(number, methods, shift=shift, needs=needs)

    others = {o.name: o for o in table_of([seed(7, ("pay",)), seed(8, ("pay",))]).others}
    assert [round(others[n].shift.value, 3) for n in ("base", "trace")] == [0.25, 0.75]  # type: ignore[union-attr]
    # The first 4 (12) of 24 tasks succeed, and every third of them is a cancellation, which nothing was trained for.
    assert [others[n].untouched.value * 8 for n in ("base", "trace")] == [2, 4]  # type: ignore[union-attr]
    assert [others[n].pass_k.value * TASKS for n in ("base", "trace")] == [4, 12]  # type: ignore[union-attr]
    table = table_of([seed(7, ("stop", "pay"))])
    assert [o.untouched for o in table.others] == [None, None], "no family is untouched"
    said = "\n".join(lines(table))
    assert "shift test" in said
    assert "pass^2" in said
    assert "untouched" not in said
    assert "Other tests" in render(table, [seed(7, ())])
    bare = table_of([seed_result(7, {"base": figures(4)}, trials=1)])
    assert "other tests" not in "\n".join(lines(bare))
