"""Stage 7: evaluate base and routed on a split, gate every adapter, promote what is proven."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from prefect import task

from db import row_id
from models.episodes import Episode
from models.router.router import Router
from models.scripted import NoopPolicy
from tasks.measuring.statistics import clustered_interval
from tasks.round.adapters import adapter_id, load_trained
from tasks.round.context import Context, current
from tasks.round.retries import RETRIES
from tasks.round.rollouts import base_ground, episodes_for, outcomes, play_owed
from tasks.route import decide

logger = logging.getLogger("trace")


@task(name="evaluate", task_run_name="evaluate {split}", **RETRIES)
def evaluate(round_id: str, split: str, capabilities: list[str]) -> dict[str, Any]:
    """Base and routed on a split with equal seeds. What the router leaves to the base is the base's own episode."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        settings = context.settings
        trials = settings.evaluation.validation_trials if split == "validation" else settings.evaluation.trials
        tasks = context.tasks(split)
        ground = base_ground(context, "evaluation")
        base_ids = play_owed(context, ground, episodes_for(tasks, trials, settings.seed), what=f"base on {split}")
        loaded = {capability: load_trained(context, capability) for capability in capabilities}
        decisions = dict(
            zip([t.id for t in tasks], decide(context, tasks, capabilities) if capabilities else [], strict=False)
        )
        routed = [
            Episode("", t, settings.seed, k, loaded.get(decisions[t.id].capability) if decisions else None)
            for t in tasks
            for k in range(trials)
        ]
        routed_ids = play_routed(context, routed, split)
        router_version = Router.load(context.folder / "router").version if decisions else "none"
        context.store.put(
            "routes",
            [
                {
                    "trajectory_id": i,
                    "round_id": round_id,
                    "router_version": router_version,
                    "capability": d.capability,
                    "adapter_id": adapter_id(round_id, d.capability) if d.capability else None,
                    "probabilities": {k or "none": v for k, v in d.probabilities.items()},
                    "neighbours": list(d.neighbours),
                    "milliseconds": d.milliseconds,
                }
                for i, e in zip(routed_ids, routed, strict=True)
                if (d := decisions.get(e.task.id))
            ],
            replace=True,
        )
        noop = play_owed(context, ground, episodes_for(tasks, 1, settings.seed), NoopPolicy(), f"no-op on {split}")
        result: dict[str, Any] = {"base_ids": base_ids, "routed_ids": routed_ids, "noop_ids": noop}
        for subject, ids in (("base", base_ids), ("routed", routed_ids), ("noop", noop)):
            frame = outcomes(context, ids)
            interval = clustered_interval(frame["success"].astype(float).to_numpy(), frame["task"].to_numpy())
            result[subject] = {"success": interval.rate, "low": interval.low, "high": interval.high}
            context.store.put(
                "evaluations",
                [
                    {
                        "id": row_id(round_id, split, subject),
                        "round_id": round_id,
                        "split": split,
                        "subject": subject,
                        "n_tasks": len(tasks),
                        "trials": 1 if subject == "noop" else trials,
                        **result[subject],
                        "detail": frame.groupby("family")["success"].mean().to_dict(),
                    }
                ],
                replace=True,
            )
        return result

    return context.stage(f"evaluate:{split}", work)


def play_routed(context: Context, episodes: list[Episode], split: str) -> list[str]:
    """Ids of routed episodes: the base's own where no adapter was chosen, the others played by adapter."""
    ids: dict[int, str] = {}
    for adapter in sorted({e.adapter or "" for e in episodes}):
        where = [i for i, e in enumerate(episodes) if (e.adapter or "") == adapter]
        mine = base_ground(context, "evaluation") if not adapter else _with_adapter(context, adapter)
        played = play_owed(context, mine, [episodes[i] for i in where], what=f"{adapter or 'base'} on {split}")
        ids |= dict(zip(where, played, strict=True))
    return [ids[i] for i in range(len(episodes))]


def _with_adapter(context: Context, capability: str) -> Any:
    return replace(base_ground(context, "evaluation"), adapter_id=adapter_id(context.round.id, capability))
