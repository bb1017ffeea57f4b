"""Statistics against published values, hand calculation, and simulation of what they promise."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tasks.measuring import statistics
from tasks.measuring.gate_plan import alpha_at
from tasks.measuring.statistics import (
    align,
    clustered_interval,
    holm,
    mde_of,
    paired_difference,
    sign_flip_p,
)
from tasks.mining.agreement import fleiss_kappa

# Fleiss' worked example of 14 raters, 10 subjects, 5 categories (kappa 0.210, as in "Fleiss' kappa", Wikipedia).
RATINGS = [
    [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
    [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
]  # fmt: skip


def tasks_of(count: int, trials: int) -> np.ndarray:
    return np.repeat(np.arange(count), trials)


def test_fleiss_kappa_matches_the_published_example():
    agreement = fleiss_kappa(RATINGS)
    assert agreement.kappa == pytest.approx(0.210, abs=5e-4)
    assert agreement.observed == pytest.approx(0.378, abs=5e-4)


def test_kappa_of_a_category_is_kappa_of_that_category_against_the_rest():
    agreement = fleiss_kappa(RATINGS)
    merged = fleiss_kappa(RATINGS, sets=((2,), (0, 1, 3, 4)))
    assert merged.kappa == pytest.approx(agreement.by_category[2])
    assert merged.by_category[0] == pytest.approx(merged.by_category[1])


def test_kappa_is_undefined_not_perfect_when_everything_is_one_category():
    agreement = fleiss_kappa([[0, 5, 0], [0, 5, 0]])
    assert agreement.kappa is None
    assert agreement.observed == 1.0
    assert agreement.by_category == (None, None, None)
    assert fleiss_kappa([[5, 0], [0, 5]]).kappa == 1.0


@pytest.mark.parametrize("counts", [[[2, 1], [1, 1]], [[1, 0]], [[3, -1]], []])
def test_kappa_refuses_unequal_or_too_few_ratings(counts):
    with pytest.raises(ValueError, match=r"same number|counts must be"):
        fleiss_kappa(counts)


def test_holm_by_hand():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1, then made monotone.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == pytest.approx([1.0, 1.0])
    assert len(holm([])) == 0
    for wrong in (float("nan"), -0.01, 1.01):
        with pytest.raises(ValueError, match="p-values"):
            holm([0.5, wrong])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_interval_at_the_ends_counts_tasks_not_trials(value):
    result = clustered_interval(np.full(80, value), tasks_of(20, 4))
    assert (result.rate, result.n, result.tasks, result.effective_n) == (value, 80, 20, 20.0)
    # Wilson for 0 of 20: upper end z^2 / (20 + z^2) = 0.161.
    width = result.high if value == 0 else 1 - result.low
    assert width == pytest.approx(0.1611, abs=1e-3)
    assert (result.low if value == 0 else result.high) == value


def test_interval_of_identical_trials_is_the_one_of_single_trials():
    once = (np.arange(40) % 4 == 0).astype(float)
    single = clustered_interval(once, np.arange(40))
    repeated = clustered_interval(np.repeat(once, 8), tasks_of(40, 8))
    assert repeated.high - repeated.low == pytest.approx(single.high - single.low, rel=0.06)
    naive = clustered_interval(np.repeat(once, 8), np.arange(320))
    assert naive.high - naive.low < 0.5 * (repeated.high - repeated.low)


def test_interval_of_single_trials_is_nearly_plain_wilson():
    result = clustered_interval(np.arange(200) % 4 == 0, np.arange(200))
    plain = stats.binomtest(50, 200).proportion_ci(method="wilson")
    assert (result.low, result.high) == pytest.approx((plain.low, plain.high), abs=2e-3)


def test_interval_leaves_errors_out_and_refuses_nothing_at_all():
    result = clustered_interval([1, 0, np.nan, 1], ["a", "a", "a", "b"])
    assert result.rate == pytest.approx(0.75)  # mean of task means 0.5 and 1
    assert result.n == 3
    assert 0 <= result.low < result.rate < result.high <= 1
    one = clustered_interval([1, 0, 1, 1], ["a"] * 4)
    assert one.effective_n == 1.0
    assert one.high - one.low > 0.7
    with pytest.raises(ValueError, match="no outcome"):
        clustered_interval([np.nan], ["a"])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        clustered_interval([2.0], ["a"])


def test_interval_by_hand():
    """Four tasks of three trials with means 1, 2/3, 1/3 and 0, three of them with the rarer outcome: the design effect
    12 (5/27) / 4 / 0.25 = 20/9, the size shrunk by (2.200985 / 3.182446)^2, both averaged with two tasks of trials all
    alike; then Wilson's interval on that."""
    result = clustered_interval([1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0], tasks_of(4, 3))
    shrink = (2.200985 / 3.182446) ** 2
    size = 12 * (3 + 2) / (3 * 20 / 9 / shrink + 2 * 3)
    assert result.effective_n == pytest.approx(size, rel=1e-6)
    half = 1.959964 / (1 + 1.959964**2 / size) * (0.25 / size + 1.959964**2 / (4 * size**2)) ** 0.5
    assert (result.rate, result.low, result.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-5)


def test_paired_interval_by_hand_ends_where_a_difference_does():
    """One of three tasks gained: with a pseudo-task of either sign 0.2, and an error of sqrt((2/5 - 0.2^2) / 5)."""
    one = paired_difference([0, 0, 0], [1, 0, 0], tasks_of(3, 1))
    assert one.low == pytest.approx(100 * (0.2 - 4.302653 * ((2 / 5 - 0.04) / 5) ** 0.5), rel=1e-6)
    assert (one.points, one.high, one.changed) == (pytest.approx(100 / 3), 100.0, 1)
    for base, points in ((0, 100.0), (1, -100.0)):  # a task alone has no spread of its own
        alone = paired_difference([base], [1 - base], ["a"])
        assert (alone.points, alone.low, alone.high) == (points, -100.0, 100.0)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("tasks", [12, 40])
def test_interval_covers_at_its_level_when_trials_are_correlated(rate, tasks):
    rng = np.random.default_rng(1)
    covered, repeats = 0, 600
    for _ in range(repeats):
        own = rng.beta(2 * rate, 2 * (1 - rate), size=tasks)  # intra-task correlation 1/3
        outcomes = rng.random((tasks, 4)) < own[:, None]
        interval = clustered_interval(outcomes.ravel(), tasks_of(tasks, 4))
        covered += interval.low <= rate <= interval.high
    assert covered / repeats >= 0.93


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_paired_interval_covers_at_its_level(shift):
    rng = np.random.default_rng(2)
    covered, repeats = 0, 500
    for _ in range(repeats):
        easy = rng.choice([0.05, 0.6], size=25)
        base = rng.random((25, 3)) < easy[:, None]
        other = rng.random((25, 3)) < easy[:, None] + shift
        result = paired_difference(base.ravel(), other.ravel(), tasks_of(25, 3))
        covered += result.low <= 100 * shift <= result.high
    assert covered / repeats >= 0.93


def test_p_value_is_uniform_under_the_null_and_never_too_small():
    rng = np.random.default_rng(3)
    p = np.array([sign_flip_p(rng.normal(size=12)) for _ in range(1500)])
    assert stats.kstest(p, "uniform").pvalue > 0.01
    ties = np.array([sign_flip_p(rng.choice([-0.5, 0.0, 0.5], size=14)) for _ in range(1500)])
    for level in (0.01, 0.05, 0.2):
        assert (ties <= level).mean() <= level + 0.015


def test_p_value_by_hand_and_by_monte_carlo():
    base, other = np.zeros(6), np.ones(6)
    exact = paired_difference(base, other, np.arange(6))
    assert exact.p == pytest.approx(2 / 2**6)
    assert exact.floor_p == pytest.approx(2 / 2**6)
    assert (exact.points, exact.changed) == (100.0, 6)
    # One task the other way: |sum| >= 4 for 1 + 6 of 64 patterns on each side.
    mixed = paired_difference([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0], np.arange(6))
    assert mixed.p == pytest.approx(14 / 64)
    many = np.concatenate([np.ones(20), -np.ones(6)])
    binomial = 2 * stats.binom.cdf(6, 26, 0.5)
    assert sign_flip_p(many) == pytest.approx(binomial, rel=1e-12)


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_the_exact_p_value_is_that_of_all_patterns(trials, monkeypatch):
    monkeypatch.setattr(statistics, "EXACT_UP_TO", 0)  # also few tasks take the way of many
    rng = np.random.default_rng(trials)
    for tasks in (1, 2, 3, 5, 8, 12):
        signs = np.array([[1 - 2 * (i >> j & 1) for j in range(tasks)] for i in range(2**tasks)])
        for _ in range(12):
            mine = np.maximum(1, trials - rng.integers(0, 2, size=tasks))  # a side may have lost a trial
            whole = rng.integers(0, trials + 1, size=tasks) * mine - rng.integers(0, mine + 1) * trials
            whole = whole * (36 // (trials * mine))  # all in one fraction, so that ties are ties
            extreme = np.abs(signs @ whole) >= abs(whole.sum())
            assert sign_flip_p(whole / 36) == pytest.approx(extreme.mean(), abs=1e-12)


def test_a_clear_difference_reaches_every_level_that_a_look_may_have():
    """With as many looks as one likes: 20,000 draws alone would never give less than 5e-5."""
    for outcomes in (np.ones(100), np.full(100, 1 / 3), np.linspace(0.9, 1.0, 100) ** 2):
        clear = paired_difference(np.zeros(100), outcomes, np.arange(100))
        assert 0 < clear.floor_p <= clear.p < alpha_at(60, 0.05) / 4
    assert sign_flip_p(np.ones(100)) == paired_difference(np.zeros(100), np.ones(100), np.arange(100)).floor_p == 2**-99
    assert sign_flip_p(np.ones(5_000)) > 0  # whatever the number of tasks


def test_the_floor_is_what_the_test_can_give():
    for tasks in (3, 17, 40):
        assert paired_difference(np.zeros(tasks), np.ones(tasks), np.arange(tasks)).floor_p == 2.0 ** (1 - tasks)
    # Without a common fraction no more than the draws and the bound can give: at 18 tasks the draws.
    uneven = np.random.default_rng(6).random(18)
    assert sign_flip_p(uneven) >= paired_difference(np.zeros(18), uneven, np.arange(18)).floor_p == 1 / 20_001
    assert paired_difference(np.zeros(18), np.zeros(18), np.arange(18)).floor_p == 2.0**-17


def test_hundreds_of_tasks_cost_milliseconds():
    rng = np.random.default_rng(7)
    rates = rng.binomial(8, 0.4, size=400) / 8 - rng.binomial(7, 0.4, size=400) / 7
    began = time.perf_counter()
    p = sign_flip_p(rates)
    assert time.perf_counter() - began < 1.0  # 0.02 s on an idle machine
    draws = np.random.default_rng(8).choice([-1.0, 1.0], size=(20_000, 400)) @ rates
    assert p == pytest.approx(np.mean(np.abs(draws) >= abs(rates.sum()) - 1e-9), abs=0.015)


def test_unchanged_tasks_keep_an_honest_interval():
    result = paired_difference(np.ones(60), np.ones(60), tasks_of(30, 2))
    assert (result.points, result.p, result.changed) == (0.0, 1.0, 0)
    assert result.low < -4 < 4 < result.high
    assert mde_of(np.zeros(30)) > 4


def test_difference_is_that_of_the_two_rates_even_with_missing_trials():
    tasks = tasks_of(5, 3)
    rng = np.random.default_rng(4)
    base, other = rng.random(15).round(), rng.random(15).round()
    base[4] = other[0] = other[9] = np.nan
    difference = paired_difference(base, other, tasks)
    rates = clustered_interval(other, tasks).rate - clustered_interval(base, tasks).rate
    assert difference.points == pytest.approx(100 * rates)
    base[:3] = np.nan
    assert paired_difference(base, other, tasks).left_out == 1
    with pytest.raises(ValueError, match="no finished task"):
        paired_difference([np.nan], [1.0], ["a"])


def test_minimum_detectable_effect_is_found_with_its_power():
    rng = np.random.default_rng(5)
    tasks, spread = 60, 0.2
    mde = mde_of(rng.normal(0, spread, tasks).clip(-0.4, 0.6))
    found = np.mean([sign_flip_p(rng.normal(mde / 100, spread, tasks), draws=2000) < 0.05 for _ in range(300)])
    assert 0.7 < found <= 0.97
    assert mde_of(np.array([-1.0])) == 100.0


def test_align_pairs_by_task_and_trial():
    base = pd.DataFrame({"task": ["a", "a"], "family": "f", "trial": [0, 1], "success": [True, False]})
    other = pd.DataFrame({"task": ["a"], "family": "f", "trial": [1], "success": [True]})
    pairs = align(base, other).sort_values("trial")
    assert pairs["base"].tolist() == [1.0, 0.0]
    assert np.isnan(pairs["other"].iloc[0])
    with pytest.raises(ValueError, match="twice"):
        align(pd.concat([base, base]), other)
