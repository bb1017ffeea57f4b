"""Means over seeds: intervals and p-values that a hand can check, and how often equal methods are called different."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tasks.comparison.over_seeds import difference_over, share_over
from tasks.measuring.statistics import clustered_interval, paired_difference


def test_intervals_are_students_over_the_seeds_means() -> None:
    """Worked by hand: means 0.1, 0.2, 0.3, so 0.2 with an error of 0.1 / sqrt(3) and 2 degrees of freedom."""
    found = difference_over([np.full(10, v) for v in (0.1, 0.2, 0.3)])
    assert (found.mean, found.high - found.mean) == (pytest.approx(0.2), pytest.approx(4.302653 * 0.1 / 3**0.5))
    assert found.p == pytest.approx(0.0742, abs=1e-3)
    # Seeds that agree by chance are not known better than their tasks: 4 of 16 each, with one more of either outcome
    # 5 of 18, whose mean has an error of 0.108633.
    alike = share_over([np.array([1.0] * 4 + [0.0] * 12)] * 3)
    assert alike.high - alike.mean == pytest.approx(4.302653 * 0.108633 / 3**0.5, rel=1e-4)
    assert (difference_over([np.zeros(9)] * 3).p, difference_over([np.zeros(9)] * 3).mean) == (1.0, 0.0)
    assert math.isnan(share_over([np.full(3, np.nan)]).mean)


def test_of_one_seed_intervals_and_p_are_those_over_its_tasks() -> None:
    mixed = np.array([1.0] * 4 + [0.0] * 12)
    share, within = share_over([mixed]), clustered_interval(mixed, range(16))
    assert (share.mean, share.low, share.high) == (0.25, within.low, within.high)
    change, found = difference_over([mixed - mixed[::-1]]), paired_difference(mixed[::-1], mixed, range(16))
    assert (100 * change.low, 100 * change.high, change.p) == pytest.approx((found.low, found.high, found.p))


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_what_every_task_agrees_on_is_not_known_for_certain(seeds: int) -> None:
    share, gain = share_over([np.ones(8)] * seeds), difference_over([np.ones(8)] * seeds)
    assert share.low < share.mean == 1
    assert gain.low < gain.mean == 1
    assert 0 < gain.p < 0.1


@pytest.mark.parametrize(("seeds", "tasks", "rate"), [(1, 16, 0.95), (2, 24, 0.97), (3, 24, 0.97)])
def test_intervals_of_high_shares_hold_the_truth_as_often_as_they_say(seeds: int, tasks: int, rate: float) -> None:
    """Without the pseudo-tasks 56, 76 and 89 % of them did."""
    rng, held, runs = np.random.default_rng(0), 0, 600
    for _ in range(runs):
        found = share_over(list((rng.random((seeds, tasks)) < rate).astype(float)))
        held += found.low <= rate <= found.high
    assert held / runs >= 0.93


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_methods_are_rarely_called_different(seeds: int) -> None:
    """Also where their difference varies by 20 points from seed to seed: a bootstrap over seeds and tasks rejects 13 to
    27 % of such comparisons."""
    rng, rejected, runs = np.random.default_rng(seeds), 0, 400
    for _ in range(runs):
        shift = 0.2 * rng.standard_normal(seeds)
        values = [(rng.random(160) < 0.45 + s).astype(float) - (rng.random(160) < 0.45) for s in shift]
        rejected += difference_over(values).p < 0.05
    assert rejected / runs <= 0.08


def test_of_the_same_tasks_more_seeds_do_not_tell_of_others() -> None:
    """Five seeds that agree on every task know it as well as one does; five of other tasks know it better."""
    tasks = np.array([1.0] * 30 + [0.0] * 90 + [-1.0] * 10)
    one, same, other = (
        difference_over([tasks]),
        difference_over([tasks] * 5, same_tasks=True),
        difference_over([tasks] * 5),
    )
    assert same.high - same.low == pytest.approx(one.high - one.low, rel=0.12)
    assert other.high - other.low < 0.75 * (same.high - same.low)
    assert other.p < same.p
    shares = share_over([(tasks > 0).astype(float)] * 5, same_tasks=True)
    assert shares.high - shares.low > 1.3 * (lambda s: s.high - s.low)(share_over([(tasks > 0).astype(float)] * 5))


def crossed(seeds: tuple[float, ...], tasks: list[float]) -> list[np.ndarray]:
    """Differences that are an effect of the seed and one of the task, (T,) by seed."""
    return [seed + np.array(tasks) for seed in seeds]


def test_seeds_and_the_same_tasks_are_crossed_by_hand() -> None:
    """Variances of the mean: 0.0100533 over three seeds (no more is seen than a seed's own, 0.03016), 0.0357143 over
    eight tasks, together 0.0457676 with 0.0457676^2 / (0.0100533^2 / 2 + 0.0357143^2 / 7) degrees of freedom."""
    found = difference_over(crossed((0.1, 0.1, 0.1), [-0.5, 0.5] * 4), same_tasks=True)
    freedom, error = 9.0, 0.213934
    assert found.high - found.mean == pytest.approx(float(stats.t.ppf(0.975, freedom)) * error, rel=1e-3)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert found.p == pytest.approx(2 * stats.t.sf(0.1 / error, freedom), rel=1e-3)
    # Three seeds 0.16 / 3, two tasks 0.16: (0.16 / 3 + 0.16)^2 / ((0.16 / 3)^2 / 2 + 0.16^2) degrees of freedom.
    found = difference_over(crossed((-0.3, 0.1, 0.5), [-0.4, 0.4]), same_tasks=True)
    assert found.p == pytest.approx(2 * stats.t.sf(0.1 / (0.16 / 3 + 0.16) ** 0.5, 1.684211), rel=1e-4)
    assert (found.low, found.high) == (-1.0, 1.0)


def test_the_wider_of_both_intervals_is_given_and_the_larger_p() -> None:
    """Seeds that differ by 0.3 each, tasks hardly: two degrees of freedom are worth less than nearly three."""
    values = crossed((0.0, 0.3, 0.6), [-0.2, 0.2] * 4)
    both, alone = difference_over(values, same_tasks=True), difference_over(values)
    assert (both.low, both.high, both.p) == (alone.low, alone.high, alone.p)
    assert both.low == pytest.approx(0.3 - 4.302653 * 0.3 / 3**0.5)
    assert both.p == pytest.approx(2 * stats.t.sf(3**0.5, 2))


def test_of_one_task_that_all_seeds_have_there_are_figures() -> None:
    found = difference_over([np.array([0.5]), np.array([0.0]), np.array([np.nan])], same_tasks=True)
    assert found.mean == 0.25
    assert found.low < 0 < found.high
    assert 0 < found.p < 1


def test_intervals_end_where_a_share_and_a_difference_do() -> None:
    for same_tasks in (False, True):
        all_, none = ([np.full(4, float(v))] * 2 for v in (1, 0))
        assert share_over(all_, same_tasks=same_tasks).high == 1.0
        assert share_over(none, same_tasks=same_tasks).low == 0.0
        apart = difference_over([np.full(4, -1.0), np.full(4, 1.0)], same_tasks=same_tasks)
        assert (apart.low, apart.high) == (-1.0, 1.0)
    half = share_over([np.array([0.0, 1.0] * 20)] * 5)
    assert 0 < half.low < 0.5 < half.high < 1


@pytest.mark.parametrize("seeds", [2, 5])
def test_equal_methods_on_the_same_tasks_are_rarely_called_different(seeds: int) -> None:
    """Each is better on other tasks, and the seeds agree on which: Student's over five of them knows these tasks, and
    takes them for all."""
    rng, runs = np.random.default_rng(seeds), 400
    crossed = alone = 0
    for _ in range(runs):
        theirs = np.sign(rng.standard_normal(60)) * 0.9
        values = [np.where(rng.random(60) < abs(theirs), np.sign(theirs), 0.0) for _ in range(seeds)]
        crossed += difference_over(values, same_tasks=True).p < 0.05
        alone += difference_over(values).p < 0.05
    assert crossed / runs <= 0.07
    assert seeds == 2 or alone / runs > crossed / runs
