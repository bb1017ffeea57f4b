"""Means over seeds with their uncertainty: what another night would give, and where the tasks stay, other tasks too.

The estimand is the mean over seeds of the mean over tasks of a task's success rate over its trials. Where the target
draws, another seed has other tasks: a seed's mean is one observation, and intervals and p-values are Student's over the
seeds' means, two-sided. A bootstrap of two to five seeds calls 13 to 27 % of equal methods different where their
difference varies by 20 points from seed to seed, this one 5 %. No mean is held to be known better than the spread over
tasks within its seeds says.

Where all seeds have the same tasks, more seeds tell nothing of other tasks: then seeds and tasks are crossed random
effects, whose variances are added (Clark, 1973, J. Verbal Learning and Verbal Behavior 12, min F'; degrees of freedom
by Satterthwaite). Two seeds may agree by chance, which alone leaves that too sure (12 % of equal methods), so the wider
of both intervals is given and the larger p. Of equal methods that are good at different tasks Student's over five seeds
of the same 200 calls 11 to 13 % different, this 3 to 6.

With one seed there is only the spread over its tasks, and nothing is said of another seed. What goes wrong on one seed
in five no statistic of five seeds sees: they all go well in a third of such comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from scipy import special

from tasks.measuring.statistics import Floats, clustered_interval, difference_of, stabilised

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its 95 % interval, and the two-sided p-value of its being 0; NaN what is not known."""

    mean: float
    low: float
    high: float
    p: float


NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan)


def share_over(by_seed: Sequence[Floats], *, same_tasks: bool = False) -> Estimate:
    """The mean over seeds of shares in [0, 1] by task, a vector (T,) of each seed; NaN are left out, and so is a seed
    of nothing else. With `same_tasks` place i of every vector is the same task. There is no p.

    The spread within a seed has one success and one failure more: it is never 0, however alike its tasks are. Of one
    seed the interval is that of `clustered_interval`."""
    seeds = _known(by_seed)
    if not seeds:
        return NOTHING
    if len(seeds) == 1:
        alone = clustered_interval(seeds[0], np.arange(len(seeds[0])), CONFIDENCE)
        return Estimate(float(seeds[0].mean()), alone.low, alone.high, math.nan)
    found = _over(by_seed, fmean(_share_error(values) ** 2 for values in seeds), same_tasks)
    return replace(_inside(found, 0.0), p=math.nan)


def difference_over(by_seed: Sequence[Floats], *, same_tasks: bool = False) -> Estimate:
    """The same of paired differences in [-1, 1]: the spread within a seed has the pseudo-tasks of `paired_difference`,
    whose interval and p are those of one seed."""
    seeds = _known(by_seed)
    if not seeds:
        return NOTHING
    if len(seeds) == 1:
        change = difference_of(seeds[0], confidence=CONFIDENCE)
        return Estimate(float(seeds[0].mean()), change.low / 100, change.high / 100, change.p)
    return _inside(_over(by_seed, fmean(stabilised(values)[1] ** 2 for values in seeds), same_tasks), -1.0)


def _known(by_seed: Sequence[Floats]) -> list[Floats]:
    """The values of each seed that has any."""
    known = (values[~np.isnan(values)] for values in by_seed)
    return [values for values in known if len(values)]


def _over(by_seed: Sequence[Floats], within: float, same_tasks: bool) -> Estimate:
    """The mean over two seeds or more; `within` is the square of a seed's own error, which the spread over seeds is
    never held to be less than."""
    means = np.array([values.mean() for values in _known(by_seed)])
    count, mean = len(means), float(means.mean())
    of_seeds = max(float(means.var(ddof=1)), within) / count
    found = _students(mean, of_seeds, count - 1)
    if not same_tasks:
        return found
    grid = np.array([values for values in by_seed if not np.isnan(values).all()])
    by_task = np.nanmean(grid[:, ~np.isnan(grid).all(axis=0)], axis=0)
    tasks = len(by_task)
    of_tasks = max(float(by_task.var(ddof=1)) / tasks if tasks > 1 else 0.0, within / count)
    freedom = (of_seeds + of_tasks) ** 2 / (of_seeds**2 / (count - 1) + of_tasks**2 / max(1, tasks - 1))
    crossed = _students(mean, of_seeds + of_tasks, freedom)
    return Estimate(mean, min(found.low, crossed.low), max(found.high, crossed.high), max(found.p, crossed.p))


def _students(mean: float, variance: float, freedom: float) -> Estimate:
    error = math.sqrt(variance)
    reach = error * float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2))
    return Estimate(mean, mean - reach, mean + reach, 2 * float(special.stdtr(freedom, -abs(mean) / error)))


def _share_error(values: Floats) -> float:
    """The standard error of a share over tasks (T,), with a task more that succeeds and one that fails."""
    return float(np.concatenate([values, [0.0, 1.0]]).std(ddof=1)) / math.sqrt(len(values) + 2)


def _inside(known: Estimate, least: float) -> Estimate:
    """The estimate with an interval that ends at `least` and 1."""
    return replace(known, low=max(least, known.low), high=min(1.0, known.high))
