"""The comparison over seeds: each method's mean with its interval, and its paired difference to TRACE.

The estimand is the mean over seeds of the mean over tasks of a task's success rate over its trials. Another night would
have another seed, and where the target draws, other tasks: so a seed's mean is one observation, and intervals and
p-values are Student's over the seeds' means, two-sided, p after Holm over the methods compared with TRACE. A bootstrap
of two to five seeds calls 13 to 27 % of equal methods different where their difference varies by 20 points from seed to
seed, this one 5 %. No mean is held to be known better than the spread over tasks within its seeds says. With one seed
there is only that spread, and nothing is said of another seed. What goes wrong on one seed in five no statistic of five
seeds sees: they all go well in a third of such comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from scipy import special

from errors import ConfigurationError
from tasks.comparison.results import Outcomes, SeedResult, check_same
from tasks.measuring.paired_tasks import pass_k_of
from tasks.measuring.statistics import Floats, clustered_interval, difference_of, holm, stabilised

REFERENCE = "trace"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A method minus TRACE in points on the seeds that have both, with 95 % interval and p after Holm."""

    points: float
    low: float
    high: float
    p: float
    seeds: int


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its 95 % interval, and the two-sided p-value of its being 0."""

    mean: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class MethodRow:
    """A method over its seeds: success in [0, 1] with its 95 % interval, and means per seed of what it used."""

    name: str
    seeds: int
    success: float
    low: float
    high: float
    difference: Difference | None
    episodes: float
    tokens: float
    seconds: float
    dollars: float


@dataclass(frozen=True)
class Share:
    """A share of successes in [0, 1] with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OtherTests:
    """What a method does beside the test split's success: `shift` on the shift test, `untouched` on the test tasks
    whose families need no capability that TRACE trained for in the same seed (the same tasks for every method),
    `pass_k` the chance that `k` trials of a test task all succeed. None where nothing was measured."""

    name: str
    shift: Share | None
    untouched: Share | None
    pass_k: Share | None


@dataclass(frozen=True)
class Table:
    """A comparison: its rows in the order in which methods were run, success by family and method, and by number of
    nested capabilities (with how many seeds have that many). `curves` have the success of a method's checkpoints
    by episodes of its budget; `others` every method's other tests, with k = `trials`."""

    target: str
    data_hash: str
    seeds: tuple[int, ...]
    budget: int
    tasks: int
    rows: tuple[MethodRow, ...]
    families: dict[str, dict[str, float]]
    capabilities: tuple[tuple[int, float, int], ...]
    curves: dict[str, tuple[tuple[float, float], ...]]
    others: tuple[OtherTests, ...]
    trials: int


def table_of(results: Sequence[SeedResult]) -> Table:
    """The comparison of seeds' results. Raises `ConfigurationError` when there is none, or two do not fit."""
    if not results:
        raise ConfigurationError("there is no seed's file to make a table of; run 'trace-agent compare-methods' first")
    check_same(results)
    first = results[0]
    names = list(dict.fromkeys(n for r in results for n in r.methods))
    rates = {n: [_rates(r, n) for r in results] for n in names}
    compared = [n for n in names if n != REFERENCE and REFERENCE in rates]
    found = {n: d for n in compared if (d := _difference(rates[n], rates[REFERENCE])) is not None}
    adjusted = dict(zip(found, holm([d.p for d in found.values()]).tolist() if found else [], strict=True))
    rows = []
    for name in names:
        there = [r.methods[name] for r in results if name in r.methods]
        known, d = _within(estimate(rates[name], shares=True)), found.get(name)
        rows.append(
            MethodRow(
                name=name,
                seeds=len(there),
                success=known.mean,
                low=known.low,
                high=known.high,
                difference=replace(d, p=adjusted[name]) if d else None,
                episodes=fmean(m.episodes for m in there),
                tokens=fmean(m.prompt_tokens + m.sampled_tokens for m in there),
                seconds=fmean(m.seconds for m in there),
                dollars=fmean(m.dollars for m in there),
            )
        )
    families = {
        family: {n: estimate([_rates(r, n, (family,)) for r in results]).mean for n in names}
        for family in sorted(set(first.families.values()))
    }
    seeds = tuple(r.seed for r in results)
    return Table(
        target=first.target,
        data_hash=first.data_hash,
        seeds=seeds,
        budget=first.budget,
        tasks=len(first.families),
        rows=tuple(rows),
        families=families,
        capabilities=_nested(results),
        curves=_curves(results),
        others=tuple(_others(results, name) for name in names),
        trials=first.trials,
    )


def _others(results: Sequence[SeedResult], name: str) -> OtherTests:
    there = [r for r in results if name in r.methods]
    beyond = [_by_task(r.methods[name].shift, sorted(r.shift)) for r in there if r.shift]
    untouched = [_rates(r, name, free) for r in there if (free := untouched_families(r))]
    k = results[0].trials
    repeated = [_pass_k(r.methods[name].outcomes, sorted(r.families), k) for r in there] if k > 1 else []
    return OtherTests(name, *map(_share, (beyond, untouched, repeated)))


def untouched_families(result: SeedResult) -> set[str]:
    """Families of the test split that need no capability that TRACE trained for; none where TRACE was not run."""
    if REFERENCE not in result.methods:
        return set()
    trained = set(result.methods[REFERENCE].trained)
    return {family for family, needs in result.needs.items() if trained.isdisjoint(needs)}


def _pass_k(outcomes: Outcomes, tasks: Sequence[str], k: int) -> Floats:
    """pass^k by task; NaN where fewer than k trials have an outcome."""
    known = [[x for x in outcomes.get(task, ()) if x is not None] for task in tasks]
    return pass_k_of(np.array([sum(x) for x in known]), np.array([len(x) for x in known]), k)


def _share(rates: Sequence[Floats]) -> Share | None:
    """The share over seeds; None without an outcome."""
    known = _within(estimate(rates, shares=True))
    return None if math.isnan(known.mean) else Share(known.mean, known.low, known.high)


def _curves(results: Sequence[SeedResult]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Mean episodes and success of each method's checkpoints, by their place in the training."""
    found: dict[str, tuple[tuple[float, float], ...]] = {}
    for name in dict.fromkeys(n for r in results for n, m in r.methods.items() if m.rollouts):
        points = [r.methods[name].rollouts for r in results if name in r.methods and r.methods[name].rollouts]
        found[name] = tuple(
            (fmean(p.count for p in at), fmean(_mean(_by_task(p.outcomes, sorted(p.outcomes))) for p in at))
            for at in ([p[k] for p in points if k < len(p)] for k in range(max(map(len, points))))
        )
    return found


def _rates(result: SeedResult, name: str, families: Container[str] | None = None) -> Floats:
    """Success by task, of these families or all; NaN where the method was not run or every trial was lost."""
    tasks = sorted(t for t, family in result.families.items() if families is None or family in families)
    if name not in result.methods:
        return np.full(len(tasks), np.nan)
    return _by_task(result.methods[name].outcomes, tasks)


def _by_task(outcomes: Outcomes, tasks: Sequence[str]) -> Floats:
    known = [[x for x in outcomes.get(task, ()) if x is not None] for task in tasks]
    return np.array([sum(x) / len(x) if x else np.nan for x in known], dtype=float)


def _mean(rates: Floats) -> float:
    known = rates[~np.isnan(rates)]
    return float(known.mean()) if len(known) else math.nan


def estimate(by_seed: Sequence[Floats], *, shares: bool = False) -> Estimate:
    """The mean over seeds of values by task, a vector (T,) of each seed; NaN are left out, and so is a seed of nothing
    else. NaN throughout where there is no value. The values are differences in [-1, 1], or `shares` in [0, 1].

    The spread within a seed is never taken for 0, however alike its tasks are: it has the pseudo-tasks of
    `paired_difference`, for shares one success and one failure. Of one seed the interval is that of
    `clustered_interval` or `paired_difference`, and p the latter's."""
    known = [values[~np.isnan(values)] for values in by_seed]
    seeds = [values for values in known if len(values)]
    if not seeds:
        return Estimate(math.nan, math.nan, math.nan, math.nan)
    means, count = np.array([values.mean() for values in seeds]), len(seeds)
    mean = float(means.mean())
    if count == 1:
        p = difference_of(seeds[0]).p
        if shares:
            found = clustered_interval(seeds[0], np.arange(len(seeds[0])), CONFIDENCE)
            return Estimate(mean, found.low, found.high, p)
        change = difference_of(seeds[0], confidence=CONFIDENCE)
        return Estimate(mean, change.low / 100, change.high / 100, p)
    within = fmean((_share_error(values) if shares else stabilised(values)[1]) ** 2 for values in seeds)
    error = math.sqrt(max(float(means.var(ddof=1)), within) / count)
    reach = error * float(special.stdtrit(count - 1, 0.5 + CONFIDENCE / 2))
    p = 2 * float(special.stdtr(count - 1, -abs(mean) / error))
    return Estimate(mean, mean - reach, mean + reach, p)


def _share_error(values: Floats) -> float:
    """The standard error of a share over tasks (T,), with a task more that succeeds and one that fails."""
    return float(np.concatenate([values, [0.0, 1.0]]).std(ddof=1)) / math.sqrt(len(values) + 2)


def _within(known: Estimate) -> Estimate:
    """The estimate of a share, whose interval ends at 0 and 1."""
    return replace(known, low=max(0.0, known.low), high=min(1.0, known.high)) if known.low == known.low else known


def _difference(rates: Sequence[Floats], reference: Sequence[Floats]) -> Difference | None:
    """The paired difference on the seeds that have both, p before Holm; None where no seed has."""
    values = [one - other for one, other in zip(rates, reference, strict=True)]
    known = estimate(values)
    if math.isnan(known.mean):
        return None
    seeds = sum(not np.isnan(v).all() for v in values)
    return Difference(100 * known.mean, 100 * known.low, 100 * known.high, known.p, seeds)


def _nested(results: Sequence[SeedResult]) -> tuple[tuple[int, float, int], ...]:
    """TRACE's success by number of capabilities, and how many seeds have that many. A seed with fewer is left out."""
    found: dict[int, list[float]] = {}
    for result in results:
        for point in result.methods[REFERENCE].capabilities if REFERENCE in result.methods else ():
            found.setdefault(point.count, []).append(_mean(_by_task(point.outcomes, sorted(result.families))))
    return tuple((count, float(np.mean(rates)), len(rates)) for count, rates in sorted(found.items()))
