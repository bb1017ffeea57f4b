"""The comparison over seeds: each method's mean with its interval, and its paired difference to TRACE.

Intervals and p-values are those of `over_seeds`, p after Holm over the methods compared with TRACE. Where there are
several seeds, a method that has one alone has no interval and no p: what its tasks say of it is another statistic than
the rest of the table's, and stays out of Holm's family.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from db import GENERALIST
from errors import ConfigurationError
from tasks.comparison.over_seeds import difference_over, share_over
from tasks.comparison.results import MethodFigures, Outcomes, SeedResult, check_same
from tasks.measuring.paired_tasks import pass_k_of
from tasks.measuring.statistics import Floats, holm

REFERENCE = "trace"


@dataclass(frozen=True)
class Difference:
    """A method minus TRACE, or a release with a member more minus that without it, in points on the seeds that have
    both, with 95 % interval and p after Holm (NaN where one of the table's seeds has both)."""

    points: float
    low: float
    high: float
    p: float
    seeds: int


@dataclass(frozen=True)
class MethodRow:
    """A method over its seeds: success in [0, 1] with its 95 % interval (NaN where one of the table's seeds has it),
    and means per seed of what it used."""

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
    """A share of successes in [0, 1] with its 95 % interval, NaN as in `MethodRow`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OtherTests:
    """What a method does beside the test split's success: `shift` on the shift test, `untouched` on the test tasks of
    `untouched_families` (the same tasks for every method), `pass_k` the chance that `k` trials of a test task all
    succeed. None where nothing was measured."""

    name: str
    shift: Share | None
    untouched: Share | None
    pass_k: Share | None


@dataclass(frozen=True)
class Table:
    """A comparison: its rows in the order in which methods were run, success by family and method, and by number of
    nested `members` of TRACE's release; `added` has what the first of them, the second and so on adds on the seeds that
    have it, p after Holm over them. `curves` have the success of a method's checkpoints by episodes of its budget;
    `others` every method's other tests, with k = `trials`. `drawn` says whether each seed has test tasks of its own.
    `lost` are the episodes that are in no figure because errors took them, by method and by test ("test split", "shift
    test"), each with how many were played; what lost none is not there."""

    target: str
    data_hash: str
    seeds: tuple[int, ...]
    budget: int
    tasks: int
    rows: tuple[MethodRow, ...]
    families: dict[str, dict[str, float]]
    members: tuple[tuple[int, float], ...]
    added: tuple[Difference, ...]
    curves: dict[str, tuple[tuple[float, float], ...]]
    others: tuple[OtherTests, ...]
    trials: int
    drawn: bool
    lost: dict[str, dict[str, tuple[int, int]]]


def table_of(results: Sequence[SeedResult]) -> Table:
    """The comparison of seeds' results. Raises `ConfigurationError` when there is none, or two do not fit."""
    if not results:
        raise ConfigurationError("there is no seed's file to make a table of; run 'trace-agent compare-methods' first")
    check_same(results)
    first = results[0]
    names = list(dict.fromkeys(n for r in results for n in r.methods))
    rates = {n: [_rates(r, n) for r in results] for n in names}
    compared = [n for n in names if n != REFERENCE and REFERENCE in rates]
    found = {n: d for n in compared if (d := _difference(results, rates[n], rates[REFERENCE])) is not None}
    adjusted = dict(zip(found, _after_holm(list(found.values())), strict=True))
    rows = []
    for name in names:
        there = [r.methods[name] for r in results if name in r.methods]
        known = _share_of(results, rates[name], not first.drawn)
        rows.append(
            MethodRow(
                name=name,
                seeds=len(there),
                success=known.value if known else math.nan,
                low=known.low if known else math.nan,
                high=known.high if known else math.nan,
                difference=adjusted.get(name),
                episodes=fmean(m.episodes for m in there),
                tokens=fmean(m.prompt_tokens + m.sampled_tokens for m in there),
                seconds=fmean(m.seconds for m in there),
                dollars=fmean(m.dollars for m in there),
            )
        )
    families = {
        family: {n: share_over([_rates(r, n, (family,)) for r in results]).mean for n in names}
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
        members=_nested(results),
        added=_added(results),
        curves=_curves(results),
        others=tuple(_others(results, name) for name in names),
        trials=first.trials,
        drawn=first.drawn,
        lost={n: lost for n in names if (lost := _lost([r.methods[n] for r in results if n in r.methods]))},
    )


def _lost(played: Sequence[MethodFigures]) -> dict[str, tuple[int, int]]:
    """Lost and played episodes of a method's seeds, by test; without a test that lost none."""
    tests = {"test split": [m.outcomes for m in played], "shift test": [m.shift for m in played]}
    found = {}
    for name, outcomes in tests.items():
        trials = [x for one in outcomes for task in one.values() for x in task]
        if lost := trials.count(None):
            found[name] = (lost, len(trials))
    return found


def _others(results: Sequence[SeedResult], name: str) -> OtherTests:
    there = [r for r in results if name in r.methods]
    beyond = [_by_task(r.methods[name].shift, sorted(r.shift)) for r in there if r.shift]
    free = [(r, families) for r in there if (families := untouched_families(r))]
    untouched = [_rates(r, name, families) for r, families in free]
    # Other capabilities with each seed may leave other families, which may well be of one size.
    fixed = not results[0].drawn
    same = fixed and len({frozenset(families) for _, families in free}) == 1
    k = results[0].trials
    repeated = [_pass_k(r.methods[name].outcomes, sorted(r.families), k) for r in there] if k > 1 else []
    parts = ((beyond, fixed), (untouched, same), (repeated, fixed))
    return OtherTests(name, *(_share_of(results, rates, same_tasks) for rates, same_tasks in parts))


def untouched_families(result: SeedResult) -> set[str]:
    """Families of the test split that need no capability that TRACE trained for; none where TRACE was not run, none
    where it trained a generalist, which learns from every family, and none where it trained for what is no tag of any
    task, as an analyst's own names are: nobody knows then which families need it. (The trainings for capabilities have
    some scenarios of other families, so that these are kept.)"""
    trained = set(result.methods[REFERENCE].trained) if REFERENCE in result.methods else {GENERALIST}
    if GENERALIST in trained:
        return set()
    if not trained <= {tag for needs in result.needs.values() for tag in needs}:
        return set()
    return {family for family, needs in result.needs.items() if trained.isdisjoint(needs)}


def _pass_k(outcomes: Outcomes, tasks: Sequence[str], k: int) -> Floats:
    """pass^k by task; NaN where fewer than k trials have an outcome."""
    known = [[x for x in outcomes.get(task, ()) if x is not None] for task in tasks]
    return pass_k_of(np.array([sum(x) for x in known]), np.array([len(x) for x in known]), k)


def _share_of(results: Sequence[SeedResult], rates: Sequence[Floats], same_tasks: bool) -> Share | None:
    """The share over seeds of `rates` by task; None without an outcome. With `same_tasks` place i of each seed's is the
    same task."""
    known = share_over(rates, same_tasks=same_tasks)
    if math.isnan(known.mean):
        return None
    if _of_one_seed(results, rates):
        return Share(known.mean, math.nan, math.nan)
    return Share(known.mean, known.low, known.high)


def _of_one_seed(results: Sequence[SeedResult], rates: Sequence[Floats]) -> bool:
    """Whether one seed alone has values, in a table of several."""
    return len(results) > 1 and sum(not np.isnan(values).all() for values in rates) == 1


def _curves(results: Sequence[SeedResult]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Mean success of each method's checkpoints over seeds, by episodes: each seed's line between its own checkpoints,
    where every seed has one."""
    found: dict[str, tuple[tuple[float, float], ...]] = {}
    for name in dict.fromkeys(n for r in results for n in r.methods):
        seeds = [r.methods[name].rollouts for r in results if name in r.methods and r.methods[name].rollouts]
        if not seeds:
            continue
        first, last = max(points[0].count for points in seeds), min(points[-1].count for points in seeds)
        most = max(map(len, seeds)) if first < last else int(first == last)
        at = np.linspace(first, last, most)
        lines = [
            np.interp(at, [p.count for p in points], [_mean(_by_task(p.outcomes, sorted(p.outcomes))) for p in points])
            for points in seeds
        ]
        if most:
            found[name] = tuple(zip(at.tolist(), np.mean(lines, axis=0).tolist(), strict=True))
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


def _difference(
    results: Sequence[SeedResult], rates: Sequence[Floats], reference: Sequence[Floats]
) -> Difference | None:
    """The paired difference on the seeds that have both, p before Holm; None where no seed has."""
    values = [one - other for one, other in zip(rates, reference, strict=True)]
    known = difference_over(values, same_tasks=not results[0].drawn)
    if math.isnan(known.mean):
        return None
    if _of_one_seed(results, values):
        return Difference(100 * known.mean, math.nan, math.nan, math.nan, 1)
    seeds = sum(not np.isnan(v).all() for v in values)
    return Difference(100 * known.mean, 100 * known.low, 100 * known.high, known.p, seeds)


def _after_holm(differences: Sequence[Difference]) -> list[Difference]:
    """The differences with their p after Holm over those that have one."""
    tested = [d.p for d in differences if not math.isnan(d.p)]
    adjusted = iter(holm(tested).tolist() if tested else [])
    return [d if math.isnan(d.p) else replace(d, p=next(adjusted)) for d in differences]


def _added(results: Sequence[SeedResult]) -> tuple[Difference, ...]:
    """What each further member of TRACE's release adds to those before it, over the seeds that have as many."""
    seeds = [(sorted(r.families), r.methods[REFERENCE].capabilities if REFERENCE in r.methods else ()) for r in results]
    most = max(len(points) for _, points in seeds)
    rates = [
        [_by_task(point.outcomes, tasks) for point in points] + [np.full(len(tasks), np.nan)] * (most - len(points))
        for tasks, points in seeds
    ]
    steps = [_difference(results, [own[k] for own in rates], [own[k - 1] for own in rates]) for k in range(1, most)]
    return tuple(_after_holm([step for step in steps if step is not None]))


def _nested(results: Sequence[SeedResult]) -> tuple[tuple[int, float], ...]:
    """TRACE's success by number of its release's members, over all seeds that have TRACE: one with fewer members stays
    at what all of them come to, one that promoted nothing at the base."""
    seeds = [(r, r.methods[REFERENCE]) for r in results if REFERENCE in r.methods]
    most = max((len(figures.capabilities) for _, figures in seeds), default=0)
    lines = [[_mean(_by_task(o, sorted(r.families))) for o in _nested_outcomes(figures, most)] for r, figures in seeds]
    return tuple((count, fmean(line[count] for line in lines)) for count in range(most))


def _nested_outcomes(figures: MethodFigures, most: int) -> list[Outcomes]:
    """Outcomes with 0 to `most` - 1 members, the last of them as often as there are no more."""
    own = [point.outcomes for point in figures.capabilities] or [figures.outcomes]
    return [*own, *[own[-1]] * (most - len(own))]
