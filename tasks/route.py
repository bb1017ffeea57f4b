"""Stage 6, `trace-agent stage route`: fit the router on what the round has seen of its adapters (method,
section 6; the router is `models.router.router`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from db import CapabilityRow, LabelRow
from environments.contract import Generators, Message, Prompt
from models.router.first_observation import Opening, embed_openings, opening_of, openings
from models.router.router import Router
from models.router.validation import calibrated, choose_mode
from tasks.mining.labels import LACKING
from tasks.round.adapters import adapter_id, registered
from tasks.round.context import Context
from tasks.round.results import RolloutResult, RouteResult
from tasks.round.rollouts import outcomes
from tasks.round.stage import stage
from tasks.synthesis.environments import stored_environment

logger = logging.getLogger("trace")

# Tasks of its own environment that the router keeps per capability.
EXAMPLES_PER_CAPABILITY = 120
# How many neighbours vote: 5 were right on 92 to 94 % of the validation tasks that need an adapter (three rounds of the
# shop), 9 on 93 to 95 %, 15 on 95 to 97 %. No more than the smallest class has, or the others would outvote it.
FEWEST, MOST = 5, 15


def _stored_openings(context: Context, ids: list[str]) -> dict[str, Opening]:
    """How stored trajectories began, by id; ids whose episode ended before the agent spoke are left out."""
    environment, found = context.target.environment(), {}
    for row in context.store.trajectories(None, id=ids):
        roles = [m["role"] for m in row.messages]
        if "assistant" in roles and roles[0] != "assistant":
            first = [Message(m["role"], m["content"]) for m in row.messages[: roles.index("assistant")]]
            found[row.id] = opening_of(Prompt.of(environment), context.base.renderer, first)
    environment.close()
    return {i: found[i] for i in ids if i in found}


def practised(frame: pd.DataFrame, families: Sequence[str], capability: str) -> dict[str, str]:
    """Class by trajectory id of the tasks of its environment that an adapter succeeded at, one trajectory a task.

    `frame` has id, task_id, family and success; tasks of other families than those the environment is about stood
    there for retention and are the base's ("").
    """
    solved = frame[frame["success"].fillna(False).astype(bool)].drop_duplicates("task_id").sort_values("task_id")
    return {r.id: capability if r.family in families else "" for r in solved.head(EXAMPLES_PER_CAPABILITY).itertuples()}


def diagnosed(frame: pd.DataFrame, labels: pd.DataFrame, capabilities: Sequence[str]) -> dict[str, str]:
    """Class by trajectory id of the diagnosis tasks, one trajectory each.

    `frame` has id, task and success; `labels` trajectory_id, capability, label and weight. A task in which the base
    succeeded in at least half of the trials is the base's (""). Any other belongs to the one of `capabilities` that
    the labels of its failures call lacking most often (and more often than not), else to the base.
    """
    solved = frame.groupby("task")["success"].mean() >= 0.5
    failed = frame[~frame["success"]].set_index("id")["task"]
    given = labels[labels["trajectory_id"].isin(failed.index) & labels["capability"].isin(capabilities)]
    votes = given["weight"].where(given["label"] == LACKING, -given["weight"])
    tasks = given["trajectory_id"].map(failed)
    total = votes.groupby([tasks.rename("task"), given["capability"]]).sum()
    ranked = total[total > 0].reset_index(name="votes").sort_values(["votes", "capability"], ascending=[False, True])
    needed = ranked.drop_duplicates("task").set_index("task")["capability"]
    first = frame.drop_duplicates("task")
    return {i: "" if solved[t] else needed.get(t, "") for i, t in zip(first["id"], first["task"], strict=True)}


def _classes(context: Context, capabilities: list[str]) -> dict[str, str]:
    """What the router is fitted on: the class of trajectories, by their ids."""
    names = {r.id: r.name for r in context.store.rows(CapabilityRow, round_id=context.round.id)}
    labels = pd.DataFrame(context.store.rows(LabelRow, round_id=context.round.id))
    labels["capability"] = labels["capability_id"].map(names)
    found = diagnosed(outcomes(context.store, context.result(RolloutResult).trajectories), labels, capabilities)
    for capability in capabilities:
        identity = adapter_id(context.round.id, capability)
        spec = stored_environment(context.store, context.round, context.target, capability, context.keep).spec
        frame = context.store.trajectory_frame(context.round.id, adapter_id=identity, environment=spec.id)
        found |= practised(frame, spec.families, capability)
    return found


@stage("route", title="fit the router")
def route(context: Context) -> RouteResult:
    """Fit on first observations: of tasks that an adapter learnt to solve, and of the diagnosis tasks."""
    capabilities = registered(context.stored)
    if not capabilities:
        return RouteResult(skipped="no capability was trained")
    labels = _classes(context, capabilities)
    with context.model:
        given = _stored_openings(context, list(labels))
        vectors = embed_openings(context.base.policy, list(given.values()))
        rows = [labels[i] for i in given]
        fitted = Router.fit(vectors, rows, list(given), max(FEWEST, min(MOST, *Counter(rows).values())))
        router = _choose(context, fitted, capabilities)
    router.save(context.folder / "router")
    return RouteResult(
        version=router.version,
        mode=router.mode,
        examples=len(given),
        labels={k or "none": v for k, v in Counter(rows).items()},
    )


def _choose(context: Context, router: Router, capabilities: list[str]) -> Router:
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
