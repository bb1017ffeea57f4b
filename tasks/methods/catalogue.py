"""The methods by name: what makes each, what it shares with others, and what it needs to be there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from db import GENERALIST
from errors import ConfigurationError
from models.scripted import NoopPolicy
from settings import Settings
from tasks.methods.adapters import generalist, merge_linear, merge_ties, oracle_route, single
from tasks.methods.constant import constant
from tasks.methods.examples import examples
from tasks.methods.gepa import TRACE_GEPA, gepa, trace_gepa
from tasks.methods.iterated import (
    CONTEXT_DISTILLATION,
    DEMONSTRATIONS,
    EXPERT_ITERATION,
    cloning,
    context_distillation,
    expert_iteration,
)
from tasks.methods.seed.answers import Answer
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import DIAGNOSIS, SeedRun
from tasks.methods.trace import placebo_capabilities, trace
from tasks.methods.trained import (
    DEMONSTRATIONS_GRPO,
    GENERALIST_GRPO,
    grpo_cloned,
    grpo_generalist,
    grpo_target,
    grpo_target_own,
    mixed,
)
from tasks.round.context import Context

Changes = Callable[[Settings], dict[str, Any]]
PLACEBO_REWARDS = "placebo-rewards"


@dataclass(frozen=True)
class Method:
    """One way to answer the target's users better. `make` may play what the account pays for.

    `inherits` are accounts that count as the method's own; `needs` are methods whose work it takes, which are run
    before it. One that works in a home of its own, beside others, says by `changes` which of the settings are others
    there; `home` is the method in whose home it works, if that is not its own. Without `changes` it works in the seed's
    home, on TRACE's round. `trains` is whether it needs a budget that fills a group; `package` is a library that it
    cannot do without.
    """

    about: str
    make: Callable[[SeedRun, Context, Account], Answer]
    inherits: tuple[str, ...] = (DIAGNOSIS,)
    needs: tuple[str, ...] = ()
    changes: Changes | None = None
    home: str = ""
    trains: bool = False
    package: str = ""

    def place(self, name: str) -> str:
        """The method in whose home the method `name` works; "" for the seed's own."""
        return "" if self.changes is None else self.home or name


def _bare(run: SeedRun, context: Context, account: Account) -> Answer:
    return Answer(context)


def _noop(run: SeedRun, context: Context, account: Account) -> Answer:
    return Answer(context, scripted=NoopPolicy())


def changed(settings: Settings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `settings` with the changes: a part of them as a whole, with its other fields as they are."""
    return {
        name: getattr(settings, name).model_copy(update=dict(value)) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }


def _unchanged(settings: Settings) -> dict[str, Any]:
    return {}


def _shuffled(settings: Settings) -> dict[str, Any]:
    return changed(settings, {"train": {"shuffled": True}})


def _ablation(about: str, changes: Mapping[str, Any] | Changes) -> Method:
    made = changes if callable(changes) else partial(changed, changes=changes)
    return Method(f"TRACE, but {about}", trace, changes=made, trains=True)


def _rank_4(settings: Settings) -> dict[str, Any]:
    """LoRA of rank 4, with the weight that the settings' rank gives a change."""
    train = settings.train
    return changed(settings, {"train": {"rank": 4, "alpha": max(1, round(4 * train.alpha / train.rank))}})


METHODS: Mapping[str, Method] = {
    "base": Method("the bare base", _bare, ()),
    "noop": Method("doing nothing", _noop, ()),
    "constant": Method("one solution for every task, the best of the most frequent", constant, changes=_unchanged),
    "examples": Method("the base with worked examples", examples, changes=_unchanged),
    "gepa": Method("GEPA on the prompt and its worked examples", gepa, changes=_unchanged, package="gepa"),
    "grpo-target": Method("GRPO on the diagnosis tasks, dense reward", grpo_target, changes=_unchanged, trains=True),
    "grpo-target-own": Method(
        "GRPO on the diagnosis tasks, the target's reward", grpo_target_own, changes=_unchanged, trains=True
    ),
    EXPERT_ITERATION: Method(
        "its successes on the diagnosis tasks, learnt from in turn", expert_iteration, changes=_unchanged, trains=True
    ),
    CONTEXT_DISTILLATION: Method(
        "new scenarios with advice, learnt without it, and no other training",
        context_distillation,
        changes=_unchanged,
        trains=True,
    ),
    DEMONSTRATIONS: Method(
        "reference solutions of new scenarios, learnt, and nothing played", cloning, (), changes=_unchanged
    ),
    DEMONSTRATIONS_GRPO: Method(
        "reference solutions learnt first, then GRPO on the diagnosis tasks",
        grpo_cloned,
        (DIAGNOSIS, DEMONSTRATIONS),
        changes=_unchanged,
        home=DEMONSTRATIONS,
        trains=True,
    ),
    "trace": Method("TRACE", trace, trains=True),
    "single": Method("TRACE's best adapter for one capability alone", single, ("trace",), ("trace",)),
    "mixed": Method("one adapter on all of TRACE's environments", mixed, needs=("trace",), trains=True),
    "merge-linear": Method("the mean of TRACE's adapters", merge_linear, ("trace",), ("trace",)),
    "merge-ties": Method("TRACE's adapters merged by TIES", merge_ties, ("trace",), ("trace",)),
    "trace-oracle-route": Method(
        "TRACE's adapters, routed by what they were trained for", oracle_route, ("trace",), ("trace",)
    ),
    TRACE_GEPA: Method(
        "GEPA's prompt first, then TRACE", trace_gepa, changes=_unchanged, home="gepa", trains=True, package="gepa"
    ),
    "placebo-capabilities": Method(
        "TRACE on capabilities that were not selected",
        placebo_capabilities,
        needs=("trace",),
        changes=_unchanged,
        trains=True,
    ),
    PLACEBO_REWARDS: Method("TRACE with shuffled advantages", trace, changes=_shuffled, trains=True),
}
# TRACE with one thing changed, to see what each part is worth: a whole round from the seed's diagnosis, in a home of
# its own. What is changed, and where in the settings: by part and field, by field alone, or by what these are.
ABLATIONS: Mapping[str, tuple[str, Mapping[str, Any] | Changes]] = {
    "select-once": ("one run of selection decides", {"selection": {"runs": 1, "required": 1}}),
    "select-always": ("every run of selection must agree", {"selection": {"runs": 10, "required": 10}}),
    "no-retention": ("no retention scenarios", {"calibration": {"retention_share": 0.0}}),
    "half-retention": ("half of the scenarios for retention", {"calibration": {"retention_share": 0.5}}),
    "no-hints": ("no hints", {"train": {"hints": 0.0}}),
    "no-focus": ("a capability's families drawn alike", {"train": {"focus": False}}),
    "unscaled": ("advantages not divided by the group's deviation", {"train": {"scaled": False}}),
    "bounded": ("the ratio bounded where advantages are negative", {"train": {"delta": 1.5}}),
    "rank-4": ("LoRA of rank 4", _rank_4),
    "all-layers": ("LoRA on all layers", {"train": {"upper_layers": None}}),
    "no-generalist": ("no generalist", {"train": {"generalist": 0}}),
    "no-practice": ("a generalist that does not practise", {"train": {"practice": 0}}),
    "last-step": ("the weights after the last step, whatever they are worth", {"train": {"candidates": 1}}),
    "router-retrieval": ("the votes of neighbours", {"router": "retrieval"}),
    "router-label": ("the router's label alone", {"router": "label"}),
    "router-both": ("the router's label and the votes of neighbours", {"router": "both"}),
}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "merge": ("merge-linear", "merge-ties"),
    "placebo": ("placebo-capabilities", PLACEBO_REWARDS),
    "ablations": ("trace", *(f"ablation-{name}" for name in ABLATIONS)),
}
ABLATED = {f"ablation-{name}": _ablation(about, changes) for name, (about, changes) in ABLATIONS.items()}
# What is measured only where it is asked for by name: a part of TRACE that not every profile has, and TRACE changed.
BY_NAME: Mapping[str, Method] = {
    GENERALIST: Method("TRACE's adapter of all successes, alone", generalist, ("trace",), ("trace",)),
    # What targeted trainings, their proof and their router are worth, beside plain GRPO from the same beginning.
    GENERALIST_GRPO: Method(
        "TRACE's generalist, then GRPO on the diagnosis tasks", grpo_generalist, needs=("trace",), trains=True
    ),
    # A release gains from any adapter that is different; what rewards are worth is seen where one adapter answers all.
    "placebo-single": Method(
        "the best adapter of placebo-rewards alone",
        single,
        (PLACEBO_REWARDS,),
        (PLACEBO_REWARDS,),
        changes=_shuffled,
        home=PLACEBO_REWARDS,
    ),
    **ABLATED,
}
EVERY: Mapping[str, Method] = {**METHODS, **BY_NAME}
QUICK = ("base", "examples", "grpo-target", "trace")


def chosen(names: Sequence[str]) -> list[str]:
    """The methods of `names` (without any, all but those of `BY_NAME`) and what they need, in the order of their runs.

    Raises `ConfigurationError` for a name that is no method's, and for a method whose library is not installed."""
    wanted = [method for name in names or METHODS for method in GROUPS.get(name, (name,))]
    for name in wanted:
        if name not in EVERY:
            raise ConfigurationError(
                f"there is no method {name!r}; choose from {', '.join(EVERY)}, or {', '.join(GROUPS)} for all of a kind"
            )
    wanted += [need for name in wanted for need in EVERY[name].needs]
    for name in wanted:
        package = EVERY[name].package
        if package and importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"method {name!r} needs the package {package!r}, which is not installed; "
                f"pip install -c constraints.txt -e '.[{package}]' in the checkout, or leave it out with --methods"
            )
    return [name for name in EVERY if name in wanted]
