"""Stage 7, `trace-agent stage evaluate` and `trace-agent stage test`: base, routed and no-op on a split, with equal
seeds (method, section 7). The validation split feeds the gate; the test split reports and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from db import EvaluationRow, RouteRow, row_id
from environments.contract import TargetTask
from models.episodes import Episode
from models.router.first_observation import openings
from models.router.router import RouteDecision, Router
from models.scripted import NoopPolicy
from tasks.measuring.statistics import clustered_interval
from tasks.round.adapters import adapter_id, load_trained, registered
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.results import EvaluateResult, GateResult, SuccessRate, TestResult
from tasks.round.rollouts import episodes_for, outcomes
from tasks.round.stage import stage


@stage("evaluate", title="evaluate on validation")
def evaluate(context: Context) -> EvaluateResult:
    """The validation split, with every adapter that was registered."""
    capabilities = registered(context.stored)
    if not capabilities:
        return EvaluateResult(skipped="no capability was trained")
    return EvaluateResult(
        **_measure(context, "validation", capabilities, context.settings.evaluation.validation_trials)
    )


@stage("test", title="evaluate on test")
def test(context: Context) -> TestResult:
    """The test split, with the adapters that were promoted."""
    return TestResult(
        **_measure(context, "test", context.result(GateResult).promoted, context.settings.evaluation.trials)
    )


test.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _measure(context: Context, split: str, capabilities: Sequence[str], trials: int) -> dict[str, Any]:
    """Play what is owed of a split and store evaluations and routes; the fields of the stage's result.

    What the router leaves to the base is the base's own episode.
    """
    seed, tasks, ground = context.settings.seed, context.tasks(split), context.ground("evaluation")
    base = context.engine.play(ground, episodes_for(tasks, trials, seed), f"base on {split}")
    loaded = {
        capability: load_trained(context.stored, context.policy, context.settings.folder, capability)
        for capability in capabilities
    }
    decisions: dict[str, RouteDecision] = {}
    if capabilities:
        decisions = dict(zip([t.id for t in tasks], _decide(context, tasks, list(capabilities)), strict=True))
    episodes = [
        Episode("", t, seed, k, loaded.get(decisions[t.id].capability) if decisions else None)
        for t in tasks
        for k in range(trials)
    ]
    routed = _play_routed(context, episodes, split)
    if decisions:
        _store_routes(context, {i: decisions[e.task.id] for i, e in zip(routed, episodes, strict=True)})
    noop = context.engine_of(NoopPolicy()).play(ground, episodes_for(tasks, 1, seed), f"no-op on {split}")
    rates = {
        subject: _store_evaluation(context, split, subject, ids, (len(tasks), 1 if subject == "noop" else trials))
        for subject, ids in (("base", base), ("routed", routed), ("noop", noop))
    }
    return {"base_ids": base, "routed_ids": routed, "noop_ids": noop, **rates}


def _decide(context: Context, tasks: list[TargetTask], allowed: list[str]) -> list[RouteDecision]:
    """The router's decision for each task; capabilities that are not `allowed` count as no adapter."""
    base = context.base
    given = openings(context.target.environment, base.renderer, tasks)
    with context.model:
        decisions = Router.load(context.folder / "router").route(base.policy, base.renderer, given)
    return [d if d.capability in allowed else replace(d, capability="") for d in decisions]


def _play_routed(context: Context, episodes: Sequence[Episode], split: str) -> list[str]:
    """Ids of routed episodes: the base's own where no adapter was chosen, the others played by adapter."""
    ids: dict[int, str] = {}
    for adapter in sorted({e.adapter or "" for e in episodes}):
        where = [i for i, e in enumerate(episodes) if (e.adapter or "") == adapter]
        mine = context.ground("evaluation") if not adapter else _with_adapter(context, adapter)
        played = context.engine.play(mine, [episodes[i] for i in where], f"{adapter or 'base'} on {split}")
        ids |= dict(zip(where, played, strict=True))
    return [ids[i] for i in range(len(episodes))]


def _with_adapter(context: Context, capability: str) -> Playground:
    return replace(context.ground("evaluation"), adapter_id=adapter_id(context.round.id, capability))


def _store_routes(context: Context, decisions: dict[str, RouteDecision]) -> None:
    """Keep the decisions, by trajectory id."""
    version = Router.load(context.folder / "router").version
    context.store.put(
        [
            RouteRow(
                trajectory_id=i,
                round_id=context.round.id,
                router_version=version,
                capability=d.capability,
                adapter_id=adapter_id(context.round.id, d.capability) if d.capability else None,
                probabilities={k or "none": v for k, v in d.probabilities.items()},
                neighbours=list(d.neighbours),
                milliseconds=d.milliseconds,
            )
            for i, d in decisions.items()
        ],
        replace=True,
    )


def _store_evaluation(
    context: Context, split: str, subject: str, ids: Sequence[str], sizes: tuple[int, int]
) -> SuccessRate:
    """Keep one side's success with its interval; `sizes` are tasks and trials."""
    frame = outcomes(context.store, ids)
    interval = clustered_interval(frame["success"].astype(float).to_numpy(), frame["task"].to_numpy())
    rate = SuccessRate(success=interval.rate, low=interval.low, high=interval.high)
    context.store.put(
        [
            EvaluationRow(
                id=row_id(context.round.id, split, subject),
                round_id=context.round.id,
                split=split,
                subject=subject,
                n_tasks=sizes[0],
                trials=sizes[1],
                **rate.model_dump(),
                detail=frame.groupby("family")["success"].mean().to_dict(),
            )
        ],
        replace=True,
    )
    return rate
