"""Success rates, paired differences and agreement, each with the uncertainty that several trials of one task leave.

The estimand is everywhere the same: the mean over *tasks* of each task's success rate over its trials. A trial lost to
an infrastructure error then changes no task's weight, and the difference of two rates is the paired difference.
Tasks are the clusters: trials of one task are not independent, so a thousand trials of ten tasks are ten observations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

Floats = npt.NDArray[np.float64]
Signs = npt.NDArray[np.int8]
Whole = npt.NDArray[np.int64]

WORST_CASE_TASKS = 2.0
EXACT_UP_TO = 16
DRAWS = 20_000
PERMUTATION_SEED = 20_260_404
# Differences of success rates are multiples of 1 / (a common number of trials): up to this many, and while the sums and
# the tasks are no more than WORK together, the p-value is exact for any number of tasks.
FINEST = 5_040
WORK = 50_000_000
TINIEST = float(np.finfo(np.float64).tiny)
# Sign patterns up to this many tasks are kept (at most 1.3 MB each): a gate asks for the same few sizes many times.
KEPT_UP_TO = 64


@dataclass(frozen=True)
class Interval:
    """A success rate in [0, 1] with its confidence interval; `n` episodes of `tasks` tasks, worth `effective_n`
    independent ones."""

    rate: float
    low: float
    high: float
    n: int
    tasks: int
    effective_n: float


@dataclass(frozen=True)
class PairedDifference:
    """`other` minus `base` in percentage points over `tasks` common tasks, with interval and two-sided p-value.

    `changed` counts the tasks whose rate differs, which are the only ones the permutation test can use; `left_out`
    those that one side never finished. `floor_p` is the smallest p-value that this number of tasks could give: all of
    them changed, and in one direction."""

    points: float
    low: float
    high: float
    p: float
    tasks: int
    changed: int
    left_out: int
    floor_p: float


def clustered_interval(outcomes: Any, clusters: Any, confidence: float = 0.95) -> Interval:
    """Success rate with a confidence interval clustered by task.

    `outcomes` (n,) are in [0, 1], NaN for an episode that errored (left out); `clusters` (n,) are task ids. The
    interval is Wilson's on the effective sample size `rate (1 - rate) / variance` of Korn and Graubard (1998, Survey
    Methodology 24), where the variance is that of the mean of the G task means and the size is shrunk by `(t_{n-1} /
    t_{G-1})^2` for few tasks and held at most n; compared favourably in Franco et al. (2019, J. Surv. Stat. Methodol.
    7). How alike the trials of a task are shows only in tasks with the rarer outcome, so the design effect n /
    effective size is averaged with its worst case (trials of a task all alike), which counts as much as two such
    tasks: plain Korn-Graubard covered 90 % instead of 95 % at a rate of 0.05. Where every outcome is equal the worst
    case is left, and the effective size is the number of tasks. One task alone counts as one observation. ValueError
    without outcomes."""
    means, n = _task_means(outcomes, clusters)
    tasks = len(means)
    if not tasks:
        raise ValueError("no outcome to take a rate of: every episode is missing; play some before asking for it")
    rate = min(max(float(means.mean()), 0.0), 1.0)
    size = _effective_size(means, rate, n, confidence)
    z = float(special.ndtri(0.5 + confidence / 2))
    centre = (rate + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * float(np.sqrt(rate * (1 - rate) / size + z * z / (4 * size * size)))
    low = 0.0 if rate == 0.0 else max(0.0, centre - half)
    high = 1.0 if rate == 1.0 else min(1.0, centre + half)
    return Interval(rate, low, high, n, tasks, size)


def success_interval(frame: pd.DataFrame, by: str = "task") -> Interval:
    """The interval of a frame's outcomes `success`, clustered by its column `by`."""
    return clustered_interval(frame["success"].astype(float).to_numpy(), frame[by].to_numpy())


def paired_difference(base: Any, other: Any, tasks: Any, confidence: float = 0.95) -> PairedDifference:
    """How much better `other` is than `base`, task by task.

    All three are (n,): row i holds both sides' outcome in [0, 1] of the same task, trial and seed; NaN where that side
    errored, which leaves the trial out on that side alone. Per task the trials are averaged, then subtracted. *p*:
    two-sided sign-flip permutation over tasks; exact over all 2^m patterns for m <= 16 changed tasks, and for more
    whose differences are multiples of one fraction, as those of success rates are; else 20,000 draws from a
    fixed seed with the observed one counted in, and where none of these is as extreme Hoeffding's bound if it is
    smaller; so p is never 0. Ties with the observed sum count as at least as extreme; unchanged tasks are inert and
    cost nothing. *interval*: Agresti and Min (2005, Statistics in Medicine 24) generalised from matched pairs to task
    differences: two pseudo-tasks (half +1, half -1, one 0) keep it from shrinking to nothing when all tasks agree;
    quantiles of t with G - 1 degrees of freedom. ValueError when no task was finished by both sides."""
    return difference_of(*task_differences(base, other, tasks), confidence)


def difference_of(differences: Floats, left_out: int = 0, confidence: float = 0.95) -> PairedDifference:
    """The paired difference of tasks whose differences (G,) in [-1, 1] are known. ValueError when there is none."""
    if not len(differences):
        raise ValueError("the two sides share no finished task: nothing can be paired; evaluate both on the same tasks")
    count = len(differences)
    mean, error = stabilised(differences)
    half = _t_quantile(0.5 + confidence / 2, count) * error
    changed = int(np.count_nonzero(np.abs(differences) > 1e-12))
    return PairedDifference(
        points=100 * float(differences.mean()),
        low=100 * max(-1.0, mean - half),
        high=100 * min(1.0, mean + half),
        p=sign_flip_p(differences),
        tasks=count,
        changed=changed,
        left_out=left_out,
        floor_p=_floor_p(differences),
    )


def mde_of(differences: Floats, power: float = 0.8, alpha: float = 0.05) -> float:
    """The smallest true difference, in points, that a two-sided test at `alpha` would find with probability `power` in
    as many tasks as have these differences (G,); 100, which means "none", where no p-value of so few reaches `alpha`.

    `(t_{1-alpha/2} + t_power) * standard error` and a sum's step: Miller (2024), Adding Error Bars to Evals, arXiv
    2411.00640, section 5. The spread (at least `stabilised`) is that seen, with such a gain's in place of the gain's
    seen: some tasks change, as far as those seen, the others not. At least what changes as many as the test needs."""
    count, needed = len(differences), _changed_needed(alpha)
    if count < needed:
        return 100.0
    seen, (_, error) = abs(float(differences.mean())), stabilised(differences)
    sizes = np.abs(differences[np.abs(differences) > 1e-12])
    # Where nothing changed nothing is known of how far a task would: as far as it can.
    far, step = (float(sizes.sum()) + 1) / (len(sizes) + 1), float(sizes.min(initial=1.0))
    reach = _t_quantile(1 - alpha / 2, count) + _t_quantile(power, count)
    least = gain = far * float(special.betaincinv(needed, count - needed + 1, power))
    for _ in range(40):  # halves what is missing, or more
        own = max(0.0, (gain - seen) * (far - gain - seen))
        gain = max(least, reach * max(error, float(np.sqrt((differences.var() + own) / count))) + step / count)
    return min(100.0, 100 * gain)


def _changed_needed(alpha: float) -> int:
    """How many tasks have to change, all in one direction, for a p-value of `alpha`."""
    return int(np.ceil(1 - np.log2(alpha)))


def tasks_needed(
    gain: float, base_rate: float, trials: int, alpha: float = 0.05, power: float = 0.8, alike: float = 0.5
) -> int:
    """How many tasks of `trials` trials each find a true gain of `gain` points with probability `power` at `alpha`.

    `base_rate` in [0, 1] is the success without the gain. The variance of a task's difference is taken as
    (p (1 - p) + q (1 - q)) (alike + (1 - alike) / trials) for the rates p and q of the two sides: `alike` is the share
    of an outcome's variance that lies between tasks and that more trials cannot average away, and the two sides are
    taken as independent, which asks for too many tasks rather than too few. `alpha` is that of one test: divide that of
    a look by the capabilities tried. ValueError for a gain that is none and for values out of range."""
    values = {"base_rate": (base_rate, 0, 1), "alike": (alike, 0, 1), "alpha": (alpha, 0, 1), "power": (power, 0, 1)}
    for name, (value, low, high) in values.items():
        if not low <= value <= high or (name in ("alpha", "power") and value in (low, high)):
            raise ValueError(f"{name} is {value!r}; give a number between {low} and {high}")
    if not 0 < gain <= 100 or trials < 1:
        raise ValueError(f"a gain of {gain!r} points in {trials!r} trials cannot be looked for; both must be above 0")
    reached = min(1.0, base_rate + gain / 100)
    spread = base_rate * (1 - base_rate) + reached * (1 - reached)
    # Where every outcome is certain the sample may still hold another one: no less than one task in a hundred.
    variance = max(spread, 0.01) * (alike + (1 - alike) / trials)
    changed, shift = _changed_needed(alpha), gain / 100

    def finds(tasks: int) -> bool:
        # Random signs spread by the gain as well, so a large one hides itself in part. And a sum of outcomes moves in
        # whole steps, which costs the permutation test of few tasks some of its level.
        without, with_it = np.sqrt((variance + shift**2) / tasks), np.sqrt(variance / tasks)
        reach = float(special.ndtri(1 - alpha / 2) * without + special.ndtri(power) * with_it) + 0.5 / (trials * tasks)
        return reach <= shift and float(special.bdtrc(changed - 1, tasks, shift)) >= power

    low = high = max(3, changed)
    while not finds(high):
        low, high = high, 2 * high
    return low + bisect_left(range(low, high), True, key=finds)


def align(base: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Joins two sides' episodes [task, family, trial, success] into pairs [task, family, trial, base, other].

    An episode that one side lacks is NaN there. Raises ValueError when a (task, trial) occurs twice on a side.
    """
    keys = ["task", "family", "trial"]
    for name, side in (("base", base), ("other", other)):
        if side.duplicated(["task", "trial"]).any():
            twice = side.loc[side.duplicated(["task", "trial"]), ["task", "trial"]].iloc[0]
            raise ValueError(f"{name} holds task {twice['task']!r} trial {twice['trial']!r} twice; give each once")
    left = base[[*keys, "success"]].rename(columns={"success": "base"}).astype({"base": float})
    right = other[[*keys, "success"]].rename(columns={"success": "other"}).astype({"other": float})
    return left.merge(right, on=keys, how="outer")


def sign_flip_p(differences: Floats, draws: int = DRAWS) -> float:
    """Two-sided p-value of the mean of `differences` (G,) under random signs; see `paired_difference`."""
    return float(sign_flip_p_of_rows(differences[None, :], draws)[0])


def sign_flip_p_of_rows(differences: Floats, draws: int = DRAWS) -> Floats:
    """`sign_flip_p` of every row of `differences` (N, G), as (N,). Rows without an exact p-value of their own in which
    equally many tasks changed share their sign patterns: thousands cost little more than the product of two matrices.
    """
    moved = np.abs(differences) > 1e-12
    sizes = moved.sum(axis=1)
    p, open_ = np.ones(len(differences)), sizes > 0
    for row in np.flatnonzero(sizes > EXACT_UP_TO):
        whole = _whole_numbers(differences[row][moved[row]])
        if whole is not None:
            p[row], open_[row] = _exact_p(whole), False
    for m in np.unique(sizes[open_]).tolist():
        rows = np.flatnonzero(open_ & (sizes == m))
        values = differences[rows][moved[rows]].reshape(len(rows), m)
        observed = np.abs(values.sum(axis=1)) - 1e-9 * np.abs(values).sum(axis=1)
        extreme, patterns = np.zeros(len(rows), dtype=np.int64), 0
        for signs in _sign_patterns(m, draws):
            patterns += len(signs)
            wide = signs.astype(np.float64)
            for i in range(0, len(rows), 64):  # 64 sums of 20,000 patterns are 10 MB
                part = slice(i, i + 64)
                extreme[part] += np.count_nonzero(np.abs(wide @ values[part].T) >= observed[part], axis=0)
        if m <= EXACT_UP_TO:
            p[rows] = extreme / patterns
            continue
        # Hoeffding's bound holds for every sum of signed numbers, so a level below 1 / (1 + draws) is kept with it.
        bound = np.maximum(TINIEST, 2 * np.exp(-(values.sum(axis=1) ** 2) / (2 * (values**2).sum(axis=1))))
        p[rows] = np.where(extreme > 0, (1 + extreme) / (1 + patterns), np.minimum(1 / (1 + patterns), bound))
    return p


def _whole_numbers(changed: Floats) -> Whole | None:
    """Changed tasks' differences (m,) in multiples of the largest fraction that they share; None where there is none,
    or their sums are too many."""
    finest = np.arange(1, FINEST + 1, dtype=np.float64)
    for value in np.unique(np.abs(changed)):
        multiples = value * finest
        finest = finest[np.abs(multiples - np.rint(multiples)) < 1e-9]
        if not len(finest):
            return None
    whole = np.rint(changed * finest[0]).astype(np.int64)
    whole //= np.gcd.reduce(whole)
    return whole if len(whole) * (1 + _against(whole)) <= WORK else None


def _against(whole: Whole) -> int:
    """What the differences in the rarer direction sum to, as a number above 0."""
    return int(min(-whole[whole < 0].sum(), whole[whole > 0].sum()))


def _exact_p(whole: Whole) -> float:
    """Two-sided sign-flip p-value of whole differences (m,), none of them 0.

    A pattern's sum is at least as extreme in the observed direction where what it turns against that direction sums to
    no more than what was observed against it; the other direction mirrors it. Sums above that need not be known, so the
    clearer a difference is, the less it costs."""
    most = _against(whole)
    chance = np.zeros(most + 1)
    chance[0] = 1.0
    reached = 0
    for step in np.sort(np.abs(whole)).tolist():
        reached = min(most, reached + step)
        turned = chance[: max(0, reached + 1 - step)].copy()
        chance[: reached + 1] *= 0.5
        chance[step : reached + 1] += 0.5 * turned
    return min(1.0, max(TINIEST, 2 * float(chance.sum())))


def _floor_p(differences: Floats) -> float:
    """The smallest p-value of so many tasks; without a common fraction, what the draws and the bound could give."""
    count = len(differences)
    floor = max(TINIEST, 2.0 ** max(1 - count, -1022))
    if count <= EXACT_UP_TO or _whole_numbers(differences[np.abs(differences) > 1e-12]) is not None:
        return floor
    return max(floor, min(1 / (1 + DRAWS), 2 * float(np.exp(-count / 2))))


def _sign_patterns(m: int, draws: int) -> Iterator[Signs]:
    """Patterns of m signs in blocks (rows, m): half of all of them (the other half mirrors it) up to `EXACT_UP_TO`,
    else `draws` drawn from a fixed seed."""
    if m <= KEPT_UP_TO:
        yield _kept_patterns(m, draws)
        return
    rng = np.random.default_rng(PERMUTATION_SEED)
    rows = max(1, 4_000_000 // m)
    for start in range(0, draws, rows):
        yield _drawn_signs(rng, min(rows, draws - start), m)


@lru_cache(maxsize=KEPT_UP_TO)
def _kept_patterns(m: int, draws: int) -> Signs:
    if m > EXACT_UP_TO:
        return _drawn_signs(np.random.default_rng(PERMUTATION_SEED), draws, m)
    patterns = np.arange(1 << (m - 1), dtype=np.int64)[:, None]
    return (1 - 2 * ((patterns >> np.arange(m)) & 1)).astype(np.int8)


def _drawn_signs(rng: np.random.Generator, rows: int, m: int) -> Signs:
    return rng.integers(0, 2, size=(rows, m), dtype=np.int8) * np.int8(2) - np.int8(1)


def holm(p_values: Sequence[float] | npt.ArrayLike) -> Floats:
    """Holm's (1979) step-down adjusted p-values, (m,) in the order given. ValueError for a value outside [0, 1]."""
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or not np.all((p >= 0) & (p <= 1)):
        raise ValueError(f"p-values must be one row of numbers in [0, 1], got {p_values!r}")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted


def _task_means(outcomes: Any, clusters: Any) -> tuple[Floats, int]:
    """Means over finished trials by task, (G,), and the number of finished trials."""
    values = np.asarray(outcomes, dtype=np.float64)
    ids = np.asarray(clusters)
    if values.shape != ids.shape or values.ndim != 1:
        raise ValueError(f"outcomes and clusters must be rows of one length, got {values.shape} and {ids.shape}")
    kept = ~np.isnan(values)
    if np.any((values[kept] < 0) | (values[kept] > 1)):
        raise ValueError("outcomes must lie in [0, 1] (NaN for an episode that errored)")
    codes, _ = pd.factorize(ids[kept])
    return np.bincount(codes, weights=values[kept]) / np.bincount(codes), int(kept.sum())


def task_differences(base: Any, other: Any, tasks: Any) -> tuple[Floats, int]:
    """Per-task differences of mean outcomes, (G,), and how many tasks one side never finished; arguments as in
    `paired_difference`."""
    return finished_differences(*(means_of(*side) for side in task_counts(base, other, tasks)))


def finished_differences(base: Floats, other: Floats) -> tuple[Floats, int]:
    """`other - base` of the tasks where both have a value, and how many lack one; (G,) each, NaN for none."""
    differences = other - base
    finished = ~np.isnan(differences)
    return differences[finished], int((~finished).sum())


def means_of(sums: Floats, trials: Floats) -> Floats:
    """Mean outcome by task, NaN without a finished trial."""
    return np.divide(sums, trials, out=np.full(len(sums), np.nan), where=trials > 0)


def task_counts(base: Any, other: Any, tasks: Any) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """For each side the sum of outcomes and the number of finished trials, by task in the order of their first rows,
    (G,) each; arguments as in `paired_difference`. ValueError for outcomes out of range."""
    codes, names = pd.factorize(np.asarray(tasks))

    def count(side: Floats) -> tuple[Floats, Floats]:
        if side.shape != codes.shape:
            raise ValueError(f"base, other and tasks must be equally long, got {side.shape} and {codes.shape}")
        kept = ~np.isnan(side)
        if np.any((side[kept] < 0) | (side[kept] > 1)):
            raise ValueError("outcomes must lie in [0, 1] (NaN for an episode that errored)")
        trials = np.bincount(codes[kept], minlength=len(names)).astype(np.float64)
        return np.bincount(codes[kept], weights=side[kept], minlength=len(names)).astype(np.float64), trials

    return count(np.asarray(base, dtype=np.float64)), count(np.asarray(other, dtype=np.float64))


def _effective_size(means: Floats, rate: float, n: int, confidence: float) -> float:
    tasks = len(means)
    if tasks == 1:
        return 1.0
    level, trials = 0.5 + confidence / 2, n / tasks
    rare = int(np.count_nonzero(means > 0 if rate <= 0.5 else means < 1))
    if rare == 0:
        return float(tasks)
    shrink = float(special.stdtrit(n - 1, level) / special.stdtrit(tasks - 1, level)) ** 2
    seen = max(1.0, n * float(means.var(ddof=1)) / tasks / (rate * (1 - rate)))
    return n * (rare + WORST_CASE_TASKS) / (rare * seen / shrink + WORST_CASE_TASKS * trials)


def stabilised(differences: Floats) -> tuple[float, float]:
    """Mean and standard error of differences (G,) after adding the two pseudo-tasks of Agresti and Min."""
    size = len(differences) + 2
    mean = float(differences.sum()) / size
    variance = (float((differences**2).sum()) + 1) / size - mean**2
    return mean, float(np.sqrt(variance / size))


def _t_quantile(level: float, tasks: int) -> float:
    # One task has no spread of its own; the heaviest tail there is keeps its interval honest (practically all of it).
    return float(special.stdtrit(max(1, tasks - 1), level))
