"""Sign flips by the thousand, pass^k, and how many tasks a gain needs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tasks.measuring.paired_tasks import PairedTasks
from tasks.measuring.statistics import (
    DRAWS,
    PERMUTATION_SEED,
    mde_of,
    paired_difference,
    sign_flip_p,
    sign_flip_p_of_rows,
    tasks_needed,
)


def one_by_one(differences: np.ndarray, whole: int = 0) -> float:
    """The definition: pattern by pattern, sum by sum where `whole` times the differences are whole, or draw by draw."""
    moved = differences[np.abs(differences) > 1e-12]
    m = len(moved)
    if m == 0:
        return 1.0
    observed = abs(moved.sum()) - 1e-9 * np.abs(moved).sum()
    if m <= 16:
        signs = np.array([[1 - 2 * (i >> j & 1) for j in range(m)] for i in range(2**m)])
        return float(np.mean(np.abs(signs @ moved) >= observed))
    if whole:
        steps = [round(whole * value) for value in moved]
        sums = Counter({0: 1})
        for step in steps:
            sums = Counter(
                {at: sums[at - step] + sums[at + step] for at in {s + d for s in sums for d in (step, -step)}}
            )
        return sum(n for at, n in sums.items() if abs(at) >= abs(sum(steps))) / 2**m
    rng = np.random.default_rng(PERMUTATION_SEED)
    signs = rng.integers(0, 2, size=(DRAWS, m), dtype=np.int8) * 2.0 - 1.0
    return (1 + np.count_nonzero(np.abs(signs @ moved) >= observed)) / (1 + DRAWS)


def pass_k(base, other, tasks, k: int):
    frame = pd.DataFrame({"task": tasks, "family": "f", "base": base, "other": other})
    return PairedTasks.of("pair", frame).pass_k(k)


def test_p_values_of_many_rows_are_those_of_each_row():
    rng = np.random.default_rng(0)
    eighths = rng.integers(-3, 4, size=(60, 40)) / 8  # with unchanged tasks, so the numbers of changed ones differ
    eighths[0], eighths[1, 3:], eighths[2, 12:] = 0.0, 0.0, 0.0
    many = sign_flip_p_of_rows(eighths)
    assert many.tolist() == [sign_flip_p(row) for row in eighths]
    assert many[:12] == pytest.approx([one_by_one(row, whole=8) for row in eighths[:12]], rel=1e-12)
    long = rng.normal(0.2, 1, size=(2, 90))  # more tasks than patterns are kept for
    assert sign_flip_p_of_rows(long).tolist() == [one_by_one(row) for row in long]


def test_pass_k_by_hand():
    tasks = np.repeat(["a", "b"], 4)
    base = np.array([1, 1, 1, 1, 1, 1, 0, 0], dtype=float)
    other = np.array([1, 1, 1, 0, 1, 1, 1, 0], dtype=float)
    # Two of four trials both succeed: base C(4,2)/C(4,2) and C(2,2)/C(4,2), other C(3,2)/C(4,2) twice.
    result = pass_k(base, other, tasks, k=2)
    assert result.points == pytest.approx(100 * ((1 / 2 - 1) + (1 / 2 - 1 / 6)) / 2)
    assert pass_k(base, other, tasks, k=1).points == paired_difference(base, other, tasks).points
    assert pass_k(base, other, tasks, k=4).points == pytest.approx(-50.0)


def test_pass_k_is_unbiased_and_leaves_tasks_with_too_few_trials_out():
    rng = np.random.default_rng(1)
    rate, k, tasks = 0.7, 3, 4_000
    drawn = (rng.random((tasks, 5)) < rate).astype(float)
    result = pass_k(np.zeros(5 * tasks), drawn.ravel(), np.repeat(np.arange(tasks), 5), k)
    assert result.points == pytest.approx(100 * rate**k, abs=1.5)
    drawn[0, :3] = np.nan
    result = pass_k(np.zeros(5 * tasks), drawn.ravel(), np.repeat(np.arange(tasks), 5), k)
    assert (result.tasks, result.left_out) == (tasks - 1, 1)


def test_pass_k_refuses_what_it_cannot_be_taken_of():
    with pytest.raises(ValueError, match="k of at least 1"):
        pass_k([1.0], [0.0], ["a"], 0)
    with pytest.raises(ValueError, match="0 or 1"):
        pass_k([0.5], [0.0], ["a"], 1)
    assert pass_k([1.0], [0.0], ["a"], 2) is None


@pytest.mark.parametrize(("gain", "base_rate", "trials", "alpha"), [(14, 0.3, 8, 0.05 / 3), (40, 0.25, 2, 0.03)])
def test_so_many_tasks_find_the_gain_with_the_power_asked_for(gain, base_rate, trials, alpha):
    tasks = tasks_needed(gain, base_rate, trials, alpha, power=0.8, alike=0.5)
    rng = np.random.default_rng(2)
    nights, p = 300, []
    rates = (base_rate, base_rate + gain / 100)
    for _ in range(nights):
        sides = []
        for rate in rates:
            own = rng.beta(rate, 1 - rate, size=tasks)  # half of an outcome's variance lies between tasks
            sides.append((rng.random((tasks, trials)) < own[:, None]).mean(axis=1))
        p.append(sign_flip_p(sides[1] - sides[0], draws=2_000))
    assert 0.74 < np.mean(np.array(p) <= alpha) < 0.92


@pytest.mark.parametrize(
    ("gain", "base_rate", "alpha"), [(60, 0.2, 0.025), (60, 0.2, 0.0076), (50, 0.3, 0.0152), (30, 0.4, 0.05)]
)
def test_a_large_gain_in_few_tasks_of_one_trial_is_found_as_often_as_said(gain, base_rate, alpha):
    """As most rounds plan: their adapters gain half of their own tasks, and each is played once."""
    tasks = tasks_needed(gain, base_rate, 1, alpha)
    base, other = np.random.default_rng(5).random((2, 2_000, tasks)) < [[[base_rate]], [[base_rate + gain / 100]]]
    found = sign_flip_p_of_rows(other * 1.0 - base) <= alpha
    assert 0.77 < found.mean() < 0.9


def test_more_tasks_are_needed_for_less():
    needed = [tasks_needed(gain, 0.3, 8) for gain in (5, 10, 20, 40)]
    assert needed == sorted(needed, reverse=True)
    assert tasks_needed(10, 0.3, 1) > tasks_needed(10, 0.3, 8)
    assert tasks_needed(10, 0.3, 8, alpha=0.01) > tasks_needed(10, 0.3, 8)
    assert tasks_needed(100, 0.0, 8, alpha=0.001) >= 11  # 2^(1 - 10) is above 0.001
    # The effect that so many tasks can detect is the gain that they were drawn for.
    tasks = tasks_needed(20, 0.4, 1)
    rng = np.random.default_rng(3)
    base, other = (rng.random(tasks) < 0.4).astype(float), (rng.random(tasks) < 0.6).astype(float)
    assert mde_of(other - base) == pytest.approx(20, rel=0.15)


@pytest.mark.parametrize(
    ("gain", "base_rate", "trials", "alpha", "tasks"),
    [
        (5, 0.3, 2, 0.05, 1046),
        (14, 0.3, 8, 0.05 / 3, 146),
        (20, 0.4, 1, 0.05, 105),
        (50, 0.5, 3, 0.03, 17),
        (10, 0.95, 4, 0.01, 101),
        (100, 0.0, 8, 0.001, 12),
    ],
)
def test_a_plan_of_a_gain_stays_as_large_as_it_was(gain, base_rate, trials, alpha, tasks):
    """A round that goes on would draw other tasks than those that its plan holds."""
    assert tasks_needed(gain, base_rate, trials, alpha) == tasks


def test_the_detectable_effect_by_hand():
    """What (t_{1-alpha/2} + t_power) errors and a sum's step come to, with the gain's own spread in place of the gain's
    seen: four of 40 tasks gained all and two lost half; and where nothing changed."""
    for seen, far, step in ((np.array([1.0] * 4 + [-0.5] * 2 + [0.0] * 34), 6 / 7, 0.5), (np.zeros(30), 1.0, 1.0)):
        count, gain, mean = len(seen), mde_of(seen) / 100, abs(seen.mean())
        reach = stats.t.ppf(0.975, count - 1) + stats.t.ppf(0.8, count - 1)
        error = ((seen.var() + (gain - mean) * (far - gain - mean)) / count) ** 0.5
        assert gain == pytest.approx(reach * error + step / count, rel=1e-6)
    # Six tasks tell at 0.05 only where all of them change: a chance of 0.8 that they do.
    assert mde_of(np.zeros(6)) == pytest.approx(100 * 0.8 ** (1 / 6))


@pytest.mark.parametrize(
    ("tasks", "changed", "alpha"),
    [(6, 0, 0.05), (20, 0, 0.05), (160, 0, 0.05), (160, 4, 0.0076), (40, 4, 0.05), (120, 20, 0.0125)],
)
def test_what_few_changed_tasks_are_said_to_detect_is_detected(tasks, changed, alpha):
    """The permutation test needs changed tasks: where few were seen to change, the spread alone promises too much. And
    a gain changes tasks beside those that change by chance: with the spread that was seen it would be found in half."""
    seen = np.zeros(tasks)
    seen[:changed] = [1, -1] * (changed // 2)
    mde = mde_of(seen, alpha=alpha) / 100
    by_chance = changed / 2 / tasks
    drawn = np.random.default_rng(4).random((2_000, tasks))
    found = sign_flip_p_of_rows((drawn < by_chance + mde) * 1.0 - (drawn > 1 - by_chance)) <= alpha
    assert 0.75 < found.mean() < 0.95


def test_so_few_tasks_detect_nothing_where_no_p_value_reaches_the_level():
    assert mde_of(np.ones(5)) == 100.0
    assert sign_flip_p(np.ones(5)) > 0.05
    assert mde_of(np.ones(6)) < 100.0
    assert sign_flip_p(np.ones(6)) < 0.05


@pytest.mark.parametrize(
    "wrong", [{"gain": 0}, {"gain": 100.5}, {"base_rate": 1.2}, {"trials": 0}, {"alpha": 0.0}, {"alike": 2.0}]
)
def test_a_gain_that_cannot_be_looked_for_is_refused(wrong):
    with pytest.raises(ValueError, match=r"gain|base_rate|trials|alpha|alike"):
        tasks_needed(**{"gain": 10, "base_rate": 0.3, "trials": 8} | wrong)
