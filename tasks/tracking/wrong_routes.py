"""What a wrong route costs: an adapter alone, without the router, on families that it was not trained for.

Users want to know it before they call one by its name, and it says who should answer a task that is unlike all that the
router was fitted on: such a task is of nobody's families. Measured where it costs no episode: on the diagnosis tasks,
which every adapter that passed plays for the router (`tasks.route`), against what played them in the diagnosis.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from db import GENERALIST, AdapterRow, VerdictRow
from models.adapters.registry import Registry
from models.adapters.releases import registered_version
from models.adapters.runs import RunLog, as_tag, put_on_version
from tasks.measuring.paired_tasks import PairedTasks
from tasks.measuring.statistics import PairedDifference, align
from tasks.round.adapters import families_about, own_adapter
from tasks.round.context import Context
from tasks.round.results import RolloutResult
from tasks.round.rollouts import outcomes

# Level of the claim that an adapter does better on what it was not made for, over all that were tried (Bonferroni).
ALPHA = 0.05
BEGINS = "What a wrong route costs"


@dataclass(frozen=True)
class WrongRoute:
    """The adapter's paired differences on all other families together and on each, the sentence about them, and its
    success alone on all tasks, in [0, 1]."""

    together: PairedDifference
    families: Mapping[str, PairedDifference]
    sentence: str
    alone: float


def wrong_route(pair: pd.DataFrame, own: Collection[str] | None) -> WrongRoute | None:
    """From pairs as `statistics.align` makes them, `other` being the adapter alone; with `own` None it was made for no
    family more than for another, and all count. None where all families are its own (`own` empty: they are not known),
    or no task of another one was finished by both sides."""
    table = PairedTasks.of("pair", pair)
    others = table if own is None else table.of_families(table.names - set(own)) if own else None
    together = others.difference() if others else None
    if others is None or together is None:
        return None
    families = {str(name): others.of_families({name}).difference() for name in sorted(others.names)}
    each = {name: change for name, change in families.items() if change is not None}
    on = "all families" if own is None else "all other families"
    sentence = f"{BEGINS}: alone on {on} of the diagnosis, {together.points:+.1f} points over {together.tasks} tasks"
    worst = min(each, key=lambda name: each[name].points)
    if each[worst].points < 0:
        sentence += f"; most in {worst}, {each[worst].points:+.1f}"
    return WrongRoute(together, each, f"{sentence}.", float(pair["other"].mean()))


def answers_unlike(costs: Mapping[str, WrongRoute], today: str) -> str:
    """The capability that answers a task unlike all others: of those that solve significantly more than what is live on
    the families that are not their own, the one that solves most of all; where there is none, `today`'s ("" the base).
    """
    level = ALPHA / max(1, len(costs))
    better = {name: c.alone for name, c in costs.items() if c.together.points > 0 and c.together.p < level}
    return max(sorted(better), key=lambda name: better[name], default=today)


def tell_wrong_routes(context: Context, tried: Mapping[str, Sequence[str]]) -> dict[str, WrongRoute]:
    """What a wrong route would cost, by capability, added to the verdict and the version of each; `tried` are the
    trajectories of its adapter on the diagnosis tasks. Done again it changes nothing."""
    costs = dict[str, WrongRoute]()
    diagnosis = outcomes(context.store, context.result(RolloutResult).trajectories)
    first = diagnosis[diagnosis["trial"] == 0]
    for capability, ids in tried.items():
        row = context.store.row(AdapterRow, id=own_adapter(context.stored, capability))
        verdict = context.store.row(VerdictRow, round_id=context.round.id, subject=capability)
        assert row is not None, "what passed is a stored adapter"
        assert row.registered_version is not None, "what passed is registered"
        assert verdict is not None, "what passed was judged"
        own = None if capability == GENERALIST else families_about(context.store, row)
        cost = wrong_route(align(first, outcomes(context.store, list(ids))), own)
        if cost is None:
            continue
        if cost.sentence not in verdict.reasons:
            context.store.put([replace(verdict, reasons=[*verdict.reasons, cost.sentence])], replace=True)
        log_wrong_route(context.registry, capability, row.registered_version, cost)
        costs[capability] = cost
    return costs


def log_wrong_route(registry: Registry, capability: str, version: str, cost: WrongRoute) -> None:
    """Write what a wrong route to an adapter costs, in points, on its version and its run: `wrong-route/all` over all
    families that are not its own, `wrong-route/family/NAME` over each."""
    adapter = registered_version(registry, capability, version)
    families = {name: change.points for name, change in cost.families.items()}
    metrics = {"wrong-route/all": cost.together.points}
    metrics |= {f"wrong-route/family/{name}": points for name, points in families.items()}
    RunLog(registry, adapter.run_id).metrics(metrics, adapter)
    tags = {"wrong-route": f"{cost.together.points:.4g}", "wrong-route.families": as_tag(families)}
    put_on_version(registry, adapter, tags)
