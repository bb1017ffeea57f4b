"""Stage 6: fit the router on what the round has seen of its adapters, and decide which adapter answers which task."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pandas as pd
from prefect import task

from environments.contract import Generators, Message, TargetTask
from models.embedding import Opening, embed_openings, opening_of, openings
from models.router import RouteDecision, Router
from models.router_measures import calibrated, choose_mode
from tasks.context import Context, current
from tasks.mine import RETRIES, diagnosis_ids
from tasks.playing import outcomes
from tasks.selection import LACKING
from tasks.synthesize import stored_environment
from tasks.train import adapter_id

logger = logging.getLogger("trace")

# Successful training trajectories that the router keeps per capability.
EXAMPLES_PER_CAPABILITY = 120
# Of 3, 5, 9 and 15, measured on three rounds of the shop: 5 was right on 92 to 96 % of the test tasks that need an
# adapter, 9 on 94 to 99 %, 15 on 98 %; a capability with few examples is outvoted by more.
NEIGHBOURS = 9


def stored_openings(context: Context, ids: list[str]) -> dict[str, Opening]:
    """How stored trajectories began, by id; ids whose episode ended before the agent spoke are left out."""
    environment, found = context.target.environment(), {}
    for row in context.store.trajectories(None, id=ids):
        roles = [m["role"] for m in row.messages]
        if "assistant" in roles and roles[0] != "assistant":
            first = [Message(m["role"], m["content"]) for m in row.messages[: roles.index("assistant")]]
            found[row.id] = opening_of(environment, context.base.renderer, first)
    environment.close()
    return {i: found[i] for i in ids if i in found}


def practised(context: Context, capability: str) -> dict[str, str]:
    """Class by id of the trajectories in which a round's adapter succeeded at tasks of its own environment, one a task:
    in training, and on the fresh seeds. Tasks that stood there for retention are the base's ("")."""
    identity, spec = adapter_id(context.round.id, capability), stored_environment(context, capability).spec
    frame = context.store.trajectory_frame(context.round.id, adapter_id=identity, environment=spec.id)
    frame = frame[frame["success"].fillna(False).astype(bool)].drop_duplicates("task_id").sort_values("task_id")
    return {
        r.id: capability if r.family in spec.families else "" for r in frame.head(EXAMPLES_PER_CAPABILITY).itertuples()
    }


def diagnosed(context: Context, capabilities: list[str]) -> dict[str, str]:
    """Class by trajectory id of the diagnosis tasks, one each.

    It is "" where the base succeeded in at least half of the trials, else the one of `capabilities` that the labels
    call lacking most often (and more often than not), else "".
    """
    names = {r["id"]: r["name"] for r in context.store.rows("capabilities", round_id=context.round.id)}
    frame = outcomes(context, diagnosis_ids(context.round.id))
    solved = frame.groupby("task")["success"].mean() >= 0.5
    failed = frame[~frame["success"]].set_index("id")["task"]
    given = pd.DataFrame(
        [
            (failed[r["trajectory_id"]], names[r["capability_id"]], r["weight"] * (1 if r["label"] == LACKING else -1))
            for r in context.store.rows("labels", round_id=context.round.id)
            if r["trajectory_id"] in failed.index and names[r["capability_id"]] in capabilities
        ],
        columns=["task", "capability", "votes"],
    )
    votes = given.groupby(["task", "capability"])["votes"].sum()
    lacking = votes[votes > 0].sort_values(ascending=False, kind="stable").reset_index().drop_duplicates("task")
    needed = dict(zip(lacking["task"], lacking["capability"], strict=True))
    first = frame.drop_duplicates("task")
    return {i: "" if solved[t] else needed.get(t, "") for i, t in zip(first["id"], first["task"], strict=True)}


@task(name="route", task_run_name="fit the router", **RETRIES)
def fit_router(round_id: str, capabilities: list[str]) -> dict[str, Any]:
    """Fit on first observations: of tasks that an adapter learnt to solve, and of the diagnosis tasks."""
    context = current(round_id)

    def work() -> dict[str, Any]:
        labels = diagnosed(context, capabilities)
        for capability in capabilities:
            labels |= practised(context, capability)
        with context.model:
            given = stored_openings(context, list(labels))
            vectors = embed_openings(context.base.policy, list(given.values()))
            fitted = Router.fit(vectors, [labels[i] for i in given], list(given), NEIGHBOURS)
            router = choose(context, fitted, capabilities)
        router.save(context.folder / "router")
        return {
            "version": router.version,
            "mode": router.mode,
            "examples": len(given),
            "labels": {k or "none": v for k, v in Counter(labels[i] for i in given).items()},
        }

    return context.stage("route", work)


def choose(context: Context, router: Router, capabilities: list[str]) -> Router:
    """The router in the mode that the settings name (`auto` is whichever is more often right on validation), with the
    probability below which it abstains."""
    mode: str = context.settings.router
    if not isinstance(context.target, Generators):
        logger.info("%s tags no family with what it needs: the router retrieves", context.round.target)
        return router.with_mode("retrieval" if mode == "auto" else mode)
    families, base = context.target.families(), context.base
    tasks = context.tasks("validation")
    truth = [next((c for c in capabilities if c in families[t.family]), "") for t in tasks]
    rows = list(zip(openings(context.target.environment, base.renderer, tasks), truth, strict=True))
    if mode == "auto":
        mode = choose_mode(router, base.policy, base.renderer, rows).mode
    return calibrated(router.with_mode(mode), base.policy, base.renderer, rows)


def decide(context: Context, tasks: list[TargetTask], allowed: list[str]) -> list[RouteDecision]:
    """The router's decision for each task; capabilities that are not `allowed` count as no adapter."""
    base = context.base
    given = openings(context.target.environment, base.renderer, tasks)
    with context.model:
        decisions = Router.load(context.folder / "router").route(base.policy, base.renderer, given)
    return [d if d.capability in allowed else replace(d, capability="") for d in decisions]
