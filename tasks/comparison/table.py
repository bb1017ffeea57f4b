"""The comparison over seeds: each method's mean with its interval, and its paired difference to TRACE.

The estimand is the mean over seeds and tasks of a task's success rate over its trials. Seeds and tasks are both drawn:
another night would have another seed, another user other tasks. So the bootstrap draws both, crossed (every drawn seed
with every drawn task), the same draws for all methods. The p-value is the bootstrap's own, two-sided, after Holm over
the methods compared with TRACE. With one seed only tasks are drawn, and nothing is said of another seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from errors import ConfigurationError
from tasks.comparison.results import Outcomes, SeedResult, check_same
from tasks.measuring.paired_tasks import pass_k_of
from tasks.measuring.statistics import Floats, holm

REFERENCE = "trace"
DRAWS, SEED = 4_000, 20_260_404
Seeds = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """A method minus TRACE in points on the seeds that have both, with 95 % interval and p after Holm."""

    points: float
    low: float
    high: float
    p: float
    seeds: int


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


def table_of(results: Sequence[SeedResult], draws: int = DRAWS) -> Table:
    """The comparison of seeds' results. Raises `ConfigurationError` when there is none, or two do not fit."""
    if not results:
        raise ConfigurationError("there is no seed's file to make a table of; run 'trace-agent compare-methods' first")
    check_same(results)
    first, tasks = results[0], sorted(results[0].families)
    names = list(dict.fromkeys(n for r in results for n in r.methods))
    rates = {n: np.array([_rates(r, n, tasks) for r in results]) for n in names}
    compared = [n for n in names if n != REFERENCE and REFERENCE in rates and _both(rates[n], rates[REFERENCE]).any()]
    found = {n: _difference(rates[n], rates[REFERENCE], draws) for n in compared}
    adjusted = dict(zip(compared, holm([d.p for d in found.values()]).tolist() if compared else [], strict=True))
    rows = []
    for name in names:
        there = [r.methods[name] for r in results if name in r.methods]
        low, high = _interval(_bootstrap(rates[name][_there(rates[name])], draws))
        d = found.get(name)
        rows.append(
            MethodRow(
                name=name,
                seeds=len(there),
                success=_mean(rates[name]),
                low=low,
                high=high,
                difference=replace(d, p=adjusted[name]) if d else None,
                episodes=fmean(m.episodes for m in there),
                tokens=fmean(m.prompt_tokens + m.sampled_tokens for m in there),
                seconds=fmean(m.seconds for m in there),
                dollars=fmean(m.dollars for m in there),
            )
        )
    families = {
        family: {n: _mean(rates[n][:, [first.families[t] == family for t in tasks]]) for n in names}
        for family in sorted(set(first.families.values()))
    }
    seeds = tuple(r.seed for r in results)
    return Table(
        target=first.target,
        data_hash=first.data_hash,
        seeds=seeds,
        budget=first.budget,
        tasks=len(tasks),
        rows=tuple(rows),
        families=families,
        capabilities=_nested(results, tasks),
        curves=_curves(results, tasks),
        others=tuple(_others(results, name, tasks, draws) for name in names),
        trials=first.trials,
    )


def _others(results: Sequence[SeedResult], name: str, tasks: Sequence[str], draws: int) -> OtherTests:
    there = [r for r in results if name in r.methods]
    beyond = [_by_task(r.methods[name].shift, sorted(r.shift)) for r in there if r.shift]
    untouched = [
        [rate if r.families[t] in free else float("nan") for t, rate in zip(tasks, _rates(r, name, tasks), strict=True)]
        for r in there
        if (free := untouched_families(r))
    ]
    k = results[0].trials
    repeated = [_pass_k(r.methods[name].outcomes, tasks, k) for r in there] if k > 1 else []
    return OtherTests(name, *(_share(rates, draws) for rates in (beyond, untouched, repeated)))


def untouched_families(result: SeedResult) -> set[str]:
    """Families of the test split that need no capability that TRACE trained for; none where TRACE was not run."""
    if REFERENCE not in result.methods:
        return set()
    trained = set(result.methods[REFERENCE].trained)
    return {family for family, needs in result.needs.items() if trained.isdisjoint(needs)}


def _pass_k(outcomes: Outcomes, tasks: Sequence[str], k: int) -> list[float]:
    """pass^k by task; NaN where fewer than k trials have an outcome."""
    known = [[x for x in outcomes.get(task, ()) if x is not None] for task in tasks]
    found: list[float] = pass_k_of(np.array([sum(x) for x in known]), np.array([len(x) for x in known]), k).tolist()
    return found


def _share(rates: Sequence[Sequence[float]], draws: int) -> Share | None:
    """The share over seeds and tasks; None without an outcome."""
    values = np.array(rates, dtype=float)
    if not values.size or np.isnan(values).all():
        return None
    return Share(_mean(values), *_interval(_bootstrap(values[_there(values)], draws)))


def _curves(results: Sequence[SeedResult], tasks: Sequence[str]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Mean episodes and success of each method's checkpoints, by their place in the training."""
    found: dict[str, tuple[tuple[float, float], ...]] = {}
    for name in dict.fromkeys(n for r in results for n, m in r.methods.items() if m.rollouts):
        points = [r.methods[name].rollouts for r in results if name in r.methods and r.methods[name].rollouts]
        found[name] = tuple(
            (fmean(p.count for p in at), fmean(_mean(np.array(_by_task(p.outcomes, tasks))) for p in at))
            for at in ([p[k] for p in points if k < len(p)] for k in range(max(map(len, points))))
        )
    return found


def _rates(result: SeedResult, name: str, tasks: Sequence[str]) -> list[float]:
    """Success by task; NaN where the method was not run or every trial was lost."""
    if name not in result.methods:
        return [float("nan")] * len(tasks)
    return _by_task(result.methods[name].outcomes, tasks)


def _by_task(outcomes: Outcomes, tasks: Sequence[str]) -> list[float]:
    known = [[x for x in outcomes.get(task, ()) if x is not None] for task in tasks]
    return [sum(x) / len(x) if x else float("nan") for x in known]


def _there(rates: Floats) -> Seeds:
    """Seeds (S,) that have any outcome."""
    found: Seeds = np.asarray(~np.isnan(rates).all(axis=1))
    return found


def _both(rates: Floats, others: Floats) -> Seeds:
    found: Seeds = np.logical_and(_there(rates), _there(others))
    return found


def _mean(rates: Floats) -> float:
    return float(np.nanmean(rates)) if not np.isnan(rates).all() else float("nan")


def _bootstrap(values: Floats, draws: int) -> Floats:
    """Means of `values` (S, T) over drawn seeds and tasks, (draws,)."""
    rng = np.random.default_rng(SEED)
    count, tasks = values.shape
    drawn_seeds, drawn_tasks = rng.integers(0, count, (draws, count)), rng.integers(0, tasks, (draws, tasks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a draw may hit lost tasks alone: NaN, left out below
        means = np.array([np.nanmean(values[s][:, t]) for s, t in zip(drawn_seeds, drawn_tasks, strict=True)])
    return means[~np.isnan(means)]


def _interval(means: Floats) -> tuple[float, float]:
    low, high = np.quantile(means, [0.025, 0.975]) if len(means) else (float("nan"), float("nan"))
    return float(low), float(high)


def _difference(rates: Floats, reference: Floats, draws: int) -> Difference:
    """The paired difference on the seeds that have both; p before Holm."""
    both = _both(rates, reference)
    values = rates[both] - reference[both]
    means = _bootstrap(values, draws)
    low, high = _interval(means)
    beyond = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (1 + beyond) / (1 + len(means)))
    return Difference(100 * _mean(values), 100 * low, 100 * high, p, int(both.sum()))


def _nested(results: Sequence[SeedResult], tasks: Sequence[str]) -> tuple[tuple[int, float, int], ...]:
    """TRACE's success by number of capabilities, and how many seeds have that many. A seed with fewer is left out."""
    found: dict[int, list[float]] = {}
    for result in results:
        for point in result.methods[REFERENCE].capabilities if REFERENCE in result.methods else ():
            found.setdefault(point.count, []).append(_mean(np.array(_by_task(point.outcomes, tasks))))
    return tuple((count, float(np.mean(rates)), len(rates)) for count, rates in sorted(found.items()))
