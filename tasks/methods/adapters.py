"""Methods that take TRACE's adapters as they are: one of them, all of them as one, or all of them chosen by the truth.

`single`: of the adapters for one capability the one that does best on the diagnosis tasks answers every task;
`generalist`: the one that learnt from everything does. `merge-linear` and `merge-ties`: one
adapter made of all. `trace-oracle-route`: all adapters, whatever the gate said of them, chosen by the true families
of their capabilities (the rest is the generalist's), which is what a router comes to that knows what each was trained
for and nothing of what it solves. Each inherits TRACE's whole account: without it there is no adapter to take.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Literal

from db import GENERALIST, AdapterRow, AdapterState
from models.adapters.blending import blend
from models.adapters.files import adapter_digest
from tasks.measuring.lineup import Lineup, tried_on_diagnosis
from tasks.methods.seed.answers import Answer, one_adapter, shift_tasks, success_of, test_tasks
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import SeedRun
from tasks.round.adapters import adapter_id, own_adapter, registered
from tasks.round.context import Context
from tasks.round.results import ChallengeResult, RegisterResult, RouteResult
from tasks.synthesis.environments import families_of
from tasks.synthesis.learning.generalist import specialists

NONE_TRAINED = "TRACE registered no adapter, so the bare base answers"


def single(run: SeedRun, context: Context, account: Account) -> Answer:
    """Of the adapters for one capability that passed the challenge, the one with the highest success on the diagnosis
    tasks, which all of them played for the router; where there was no router, the one with the largest gain on fresh
    seeds."""
    names = specialists(registered(context.stored))
    if not names:
        return Answer(context, notes=(NONE_TRAINED,))
    routed, challenged = context.found(RouteResult), context.found(ChallengeResult)
    passed = specialists(challenged.passed) if challenged else []
    if routed and passed and not routed.skipped:
        worth = {c: success_of(context, tried_on_diagnosis(context, c)) for c in passed}
    else:
        measured = {c: context.result(RegisterResult, c) for c in names}
        worth = {c: r.adapter_success - r.base_success for c, r in measured.items()}
    best = max(worth, key=lambda c: worth[c])
    answer = one_adapter(context, best, own_adapter(context.stored, best))
    return replace(answer, notes=(f"the adapter for {best}",))


def generalist(run: SeedRun, context: Context, account: Account) -> Answer:
    """The adapter that was trained last, on the environments of all capabilities."""
    if GENERALIST not in registered(context.stored):
        return Answer(context, notes=("TRACE registered no generalist, so the bare base answers",))
    return one_adapter(context, GENERALIST, own_adapter(context.stored, GENERALIST))


def merge_linear(run: SeedRun, context: Context, account: Account) -> Answer:
    """The mean of all adapters' weight changes."""
    return _merged(context, "linear")


def merge_ties(run: SeedRun, context: Context, account: Account) -> Answer:
    """TIES (Yadav et al., 2023, arXiv 2306.01708): the largest changes of each, where their signs agree."""
    return _merged(context, "ties")


def _merged(context: Context, how: Literal["linear", "ties"]) -> Answer:
    names = registered(context.stored)
    if not names:
        return Answer(context, notes=(NONE_TRAINED,))
    if len(names) == 1:
        answer = one_adapter(context, names[0], own_adapter(context.stored, names[0]))
        return replace(answer, notes=("TRACE has one adapter: nothing to merge",))
    name = f"merge-{how}"
    identity = adapter_id(context.round.id, name)
    if context.store.row(AdapterRow, id=identity) is None:
        folder = context.folder / "merged" / name
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that died here
        folder.parent.mkdir(exist_ok=True)
        weight = 1 / len(names) if how == "linear" else 1.0
        rows = [context.store.row(AdapterRow, id=own_adapter(context.stored, c)) for c in names]
        parts = {context.files.fetch(row.path): weight for row in rows if row is not None}
        blend(context.base.policy.model, parts, folder, ties=how == "ties")
        path = str(folder.relative_to(context.settings.folder))
        context.files.put(path)
        context.store.put(
            [
                AdapterRow(
                    id=identity,
                    round_id=context.round.id,
                    base=context.base.identity.base,
                    base_revision=context.base.identity.revision,
                    sha256=adapter_digest(folder),
                    path=path,
                    state=AdapterState.TRAINED,
                    config={"merged": names, "how": how},
                )
            ]
        )
    answer = one_adapter(context, name, identity)
    return replace(answer, notes=(f"merged: {', '.join(names)}",))


def oracle_route(run: SeedRun, context: Context, account: Account) -> Answer:
    """All adapters for one capability, each on the families that its environment is about; of several the one selected
    first. What none of them is about is the generalist's, where there is one."""
    there = registered(context.stored)
    names, rest = specialists(there), GENERALIST if GENERALIST in there else ""
    if not there:
        return Answer(context, notes=(NONE_TRAINED,))
    families = {f: c for c in reversed(names) for f in families_of(context, c)}
    for task in shift_tasks(context):
        families.setdefault(task.family, next((c for c in names if c in task.capabilities), rest))
    for task in test_tasks(context):
        families.setdefault(task.family, rest)
    members = {c: own_adapter(context.stored, c) for c in there}
    return Answer(context, Lineup(members), families, notes=(f"adapters: {', '.join(there)}",))
