"""The table over seeds: means, intervals and differences that a hand can check, costs, families, curves, pages."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from errors import ConfigurationError
from tasks.comparison.over_seeds import share_over
from tasks.comparison.page import lines, render
from tasks.comparison.results import Point, SeedResult
from tasks.comparison.table import MethodRow, Share, Table, table_of, untouched_families
from tasks.reporting.charts import lettered
from tests.tasks.comparison.seed_files import TASKS, figures, nested, outcomes, seed_result

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


def test_what_errors_took_of_a_method_is_told_beside_its_success() -> None:
    """A prompt that is too long for the longest tasks is measured on the short ones, and would look the better."""
    shift = {"s0": [1.0, None], "s1": [None, None]}
    of_shift = {"shift": {"s0": "cancel", "s1": "cancel"}}
    whole = {"trace": figures(12, shift={"s0": [1.0, 0.0], "s1": [0.0, 0.0]})}
    results = [seed_result(7, whole | {"gepa": figures(6, lost=4, shift=shift)}, **of_shift)]
    results.append(seed_result(8, whole, **of_shift))
    table = table_of(results)
    assert table.lost == {"gepa": {"test split": (8, 48), "shift test": (3, 4)}}
    page = render(table, results)
    for told in ("gepa: 8 of 48 episodes of the test split", "gepa: 3 of 4 episodes of the shift test"):
        assert any(line.startswith(told) for line in lines(table))
        assert told in page
    unharmed = three_seeds()
    assert "lost" not in "\n".join([*lines(table_of(unharmed)), render(table_of(unharmed), unharmed)])


def test_families_and_nested_capabilities() -> None:
    table = table_of(
        [
            seed_result(7, {"base": figures(3), "trace": figures(12, capabilities=nested(3, 6, 12))}),
            seed_result(8, {"base": figures(3), "trace": figures(9, capabilities=nested(3, 9))}),
        ]
    )
    assert table.families["cancel"]["base"] == pytest.approx(1 / 8)
    # The second seed has one member alone, and stays at it.
    assert table.members == (
        (0, pytest.approx(3 / TASKS)),
        (1, pytest.approx(7.5 / TASKS)),
        (2, pytest.approx(10.5 / TASKS)),
    )
    # What the second member adds is of the first seed alone, which is no statement about seeds.
    first, second = table.added
    assert (first.points, first.seeds) == (pytest.approx(100 * 4.5 / TASKS), 2)
    assert first.low < first.points < first.high
    assert 0 < first.p < 1
    assert (second.points, second.seeds) == (pytest.approx(100 * 6 / TASKS), 1)
    assert math.isnan(second.p)
    page = render(table, [])
    for told in ("member 1 adds +18.8 points [", "member 2 adds +25.0 points (1 of 2 seeds)"):
        assert any(told in line for line in lines(table))
        assert told in page
    nothing = seed_result(9, {"trace": figures(6)})
    assert table_of([seed_result(7, {"trace": figures(12, capabilities=nested(3, 12))}), nothing]).members == (
        (0, pytest.approx(4.5 / TASKS)),
        (1, pytest.approx(9 / TASKS)),
    )
    assert table_of([nothing]).added == ()


def test_a_curve_takes_each_seed_between_its_own_checkpoints() -> None:
    def points(**solved: int) -> tuple[Point, ...]:
        return tuple(Point(count=int(c[1:]), outcomes=outcomes(s)) for c, s in solved.items())

    def curves(*seeds: tuple[Point, ...]) -> tuple[tuple[float, float], ...]:
        made = [seed_result(7 + i, {"mixed": figures(9, rollouts=p)}) for i, p in enumerate(seeds)]
        return table_of(made).curves.get("mixed", ())

    long, late = points(e100=6, e300=12), points(e200=0, e400=24)
    # From 200, where the second begins (the first is half way to 12), to 300, where the first ends.
    assert [x for at in curves(long, late) for x in at] == pytest.approx([200, 4.5 / TASKS, 300, 12 / TASKS])
    assert curves(long, points(e300=24)) == ((300.0, pytest.approx(18 / TASKS)),)
    assert curves(long, points(e400=24)) == (), "there is no number of episodes that both have"


def test_a_method_of_one_seed_has_no_interval_among_several_and_is_in_no_family() -> None:
    results = [seed_result(s, {"base": figures(4), "trace": figures(12)}) for s in (7, 8)]
    more = [results[0].with_method("gepa", figures(6)), results[1]]
    alone, rows = rows_of(table_of(results)), rows_of(table_of(more))
    base, gepa = rows["base"].difference, rows["gepa"].difference
    assert base is not None
    assert gepa is not None
    assert base == alone["base"].difference, "its p is not multiplied for a method that is not tested"
    assert (gepa.points, gepa.seeds) == (pytest.approx(-25.0), 1)
    assert all(map(math.isnan, (gepa.low, gepa.high, gepa.p, rows["gepa"].low, rows["gepa"].high)))
    text, page = "\n".join(lines(table_of(more))), render(table_of(more), more)
    assert "nan" not in text + page
    assert "has one seed alone has neither" in page


def test_where_a_generalist_was_trained_no_family_is_untouched() -> None:
    needs = {"cancel": ["stop"], "refund": ["pay"], "move": ["send"]}
    bare = seed_result(7, {"base": figures(4), "trace": figures(12, trained=("pay",))}, needs=needs)
    first = seed_result(7, {"trace": figures(12, trained=("generalist", "pay"))}, needs=needs)
    assert untouched_families(bare) == {"cancel", "move"}
    assert untouched_families(first) == set()


@pytest.mark.parametrize("trained", [("refund_requested_items",), ("pay", "refund_requested_items")])
def test_where_a_capability_is_no_tag_no_family_is_known_to_be_untouched(trained: tuple[str, ...]) -> None:
    """An analyst's own names are none; all families, with those that were trained for, were called untouched."""
    needs = {"cancel": ["stop"], "refund": ["pay"], "move": ["send"]}
    named = seed_result(7, {"trace": figures(12, trained=trained)}, needs=needs)
    assert untouched_families(named) == set()
    assert untouched_families(named.model_copy(update={"needs": {family: [] for family in needs}})) == set()


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
        "the same for every seed",
        "over seeds and tasks",
        "0: 16.7 %, 1: 50.0 %",
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


def test_other_families_of_one_size_are_not_the_same_tasks() -> None:
    """Which families TRACE leaves untouched follows from the seed: only the same ones are crossed with the seeds."""
    needs = {"cancel": ["stop"], "refund": ["pay"], "move": ["send", "pay"]}

    def untouched(*trained: tuple[str, ...]) -> Share:
        results = [
            seed_result(7 + i, {"trace": figures(solved, trained=names)}, needs=needs)
            for i, (names, solved) in enumerate(zip(trained, (10, 14, 12), strict=True))
        ]
        (one,) = table_of(results).others
        assert one.untouched is not None
        return one.untouched

    cancel, refund = ("pay",), ("stop", "send")
    rates = [np.repeat([1.0, 0.0], [n, 8 - n]) for n in (4, 5, 4)]
    for trained, same in (((cancel, refund, cancel), False), ((cancel, cancel, cancel), True)):
        found, wanted = untouched(*trained), share_over(rates, same_tasks=same)
        assert (found.value, found.low, found.high) == pytest.approx((wanted.mean, wanted.low, wanted.high))
    assert share_over(rates, same_tasks=True).low < share_over(rates).low


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
