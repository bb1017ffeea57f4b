"""An evaluation as a person asks for it: one policy and no-op, on one target or all domains of a benchmark."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from db import open_store
from environments.contract import SPLITS, Target
from environments.targets.catalogue import groups, load_target
from environments.targets.third_party.adapter import MODEL_USER, model_of_user
from environments.task_ids import checked_tasks
from errors import BudgetExceeded, ConfigurationError
from models.providers.client import ModelClient
from models.providers.simulated_user import user_model
from models.providers.spending import Limits, SpendingCap, Spent
from settings import load_settings, writable_folder
from tasks.measuring.evaluation import (
    NOBODY,
    EvaluationSpec,
    check_context,
    check_user,
    latest,
    run_evaluation,
    spent_before,
)
from tasks.measuring.figures import EvaluationRow, figures_of, overall
from tasks.measuring.policy_names import BARE, LoadedPolicy, PolicyOptions, load_policy, parse_policy
from tasks.round.analyst import given_price

logger = logging.getLogger("trace")
NOOP = "noop"


@dataclass(frozen=True)
class EvaluateRequest:
    """What the command line asks for. `user`, `limit` (tasks) and `max_cost` (dollars) are None when not given; the
    user is then that of the settings. `user_price` is of the user's model, in dollars per million (prompt, sampled)
    tokens; None takes the analyst's where that is the same model, else LiteLLM's table."""

    target: str
    split: str
    policy: str
    trials: int = 1
    seed: int = 0
    user: str | None = None
    limit: int | None = None
    workers: int = 8
    max_cost: float | None = None
    fresh: bool = False
    home: Path | None = None
    user_price: tuple[float, float] | None = None


def evaluate_targets(request: EvaluateRequest, options: PolicyOptions) -> list[EvaluationRow]:
    """A row for the policy and one for no-op per target, and over all of them when there are several.

    What can be wrong is found before the first episode of the first target: `ConfigurationError`, `TargetError`,
    `AdapterError`, `ProviderError`. What goes wrong later is in the rows (`lost`, `owed`, `stopped`)."""
    if request.split not in SPLITS:
        raise ConfigurationError(f"split {request.split!r} does not exist; choose from {', '.join(SPLITS)}")
    settings = load_settings(home=request.home)
    writable_folder(settings.folder)
    name = parse_policy(request.policy, options.api_base)
    user, cap = request.user or settings.target_user, SpendingCap(Limits(dollars=request.max_cost))
    client = ModelClient(cap)
    a, price = settings.analyst, request.user_price or given_price(settings, model_of_user(user))
    player = user_model(user, client, price, a.concurrency, a.send_temperature)
    specs = [_spec(load_target(target, user, player), target, request) for target in expand(request.target)]
    rows: dict[str, list[EvaluationRow]] = {}
    frames: dict[str, list[tuple[EvaluationRow, pd.DataFrame]]] = {}
    with open_store(settings.database_url) as store, ExitStack() as open_ones:
        open_ones.callback(client.close)
        plan = list[tuple[LoadedPolicy, EvaluationSpec]]()
        for spec in specs:
            check_user(spec, cap, price)
            its = settings.model_copy(update={"target": spec.called})
            # What is the same for every target is loaded once: adapters and releases are a target's, the base is not.
            again = bool(plan) and not name.adapter and (name.kind != "release" or name.text == BARE)
            loaded = plan[0][0] if again else load_policy(name, options, its, spec.target, client)
            open_ones.callback(loaded.close)
            tight = check_context(spec, loaded)
            if tight:
                logger.warning("%d of %d tasks of %s do not fit the context", tight, len(spec.tasks), spec.called)
            plan.append((loaded, spec))
            if name.text != NOOP:
                plan.append(
                    (load_policy(parse_policy(NOOP), options, its, spec.target, client), replace(spec, trials=1))
                )
        plan = [(loaded, latest(store, spec, loaded, request.fresh)) for loaded, spec in plan]
        cap.before = Spent(dollars=sum(spent_before(store, spec, loaded) for loaded, spec in plan))
        stopped = _why_not_to_ask(plan)
        for loaded, spec in plan:
            paid = loaded.chat is not None or spec.user.startswith(MODEL_USER)
            # A token policy batches its episodes itself.
            workers = request.workers if paid and loaded.renderer is None else 1
            run = run_evaluation(store, spec, loaded, cap, 0 if stopped and paid else workers)
            if paid and stopped and not run.complete:
                run.stopped = stopped
            stopped = stopped or run.stopped
            row, frame = figures_of(store, spec, loaded.name.text, run)
            rows.setdefault(row.target, []).append(row)
            frames.setdefault(row.policy, []).append((row, frame))
    each = [row for found in rows.values() for row in found]
    return each if len(specs) == 1 else [*each, *(overall(request.target, found) for found in frames.values())]


def _why_not_to_ask(plan: Sequence[tuple[LoadedPolicy, EvaluationSpec]]) -> str:
    """Try each API model once; return "", or the reason why the cap on money does not allow it. Stored results
    are shown all the same."""
    try:
        for chat in {id(loaded.chat): loaded.chat for loaded, _ in plan if loaded.chat is not None}.values():
            chat.check()
    except BudgetExceeded as problem:
        return str(problem)
    return ""


def expand(name: str) -> list[str]:
    """The targets that a name stands for: itself, or every domain of a benchmark (`tau2`, `bfcl`, `agentdojo`), without
    its variants (`...:attacked`, `bfcl:single:live`)."""
    return groups().get(name, [name])


def _spec(target: Target, called: str, request: EvaluateRequest) -> EvaluationSpec:
    checked_tasks(target)
    spec = EvaluationSpec(target, called, request.split, request.trials, request.seed, request.limit)
    if not spec.tasks:
        raise ConfigurationError(f"{called} has no task in the split {request.split}; take another split")
    if request.user and spec.user == NOBODY:
        raise ConfigurationError(
            f"--user {request.user!r} is given, and {called} has no simulated user to choose (what its users say "
            "is built in); leave --user out"
        )
    if request.user and spec.user != request.user:  # only built-in targets are told who plays their user
        raise ConfigurationError(
            f"--user {request.user!r} is given, and {called} has a user of its own, {spec.user!r}, which "
            "nothing can be chosen in place of; leave --user out"
        )
    if request.user_price and not model_of_user(spec.user):
        raise ConfigurationError(
            f"--user-price {request.user_price[0]:g},{request.user_price[1]:g} is given, and no model plays the users "
            f"of {called} ({spec.user}); leave it out, or name one with --user litellm:MODEL"
        )
    return spec
