"""The environment of a capability: composed from the target's generators, or read back as it was stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from db import GENERALIST, EnvironmentRow, Round, Store, row_id
from environments.contract import SPLITS, Environment, Generators, Message, Target, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.drawing import first_made
from environments.synthesized.written import WrittenEnvironment
from environments.validation.apart import not_apart
from environments.validation.checks import Limits, ValidationVerdict, raised, validate_environment
from environments.validation.contrast import PROBED, SHARE, Contrast, one_answer
from environments.validation.playing import FAULTS, OUTSIDE
from errors import EnvironmentFault, TargetError
from settings import Settings
from tasks.round.context import Context
from tasks.synthesis.llm_synthesizer import accepted_environment

# Success of the base from which a family counts as mastered: nothing to train there, much to forget.
MASTERED = 0.5


class TrainingSpec(Protocol):
    """What a training has to know of its environment beside the scenarios: who it is, and what it is for."""

    @property
    def id(self) -> str: ...
    @property
    def capability(self) -> str: ...
    @property
    def retention_share(self) -> float: ...


class TrainingEnvironment(Protocol):
    """What an adapter is trained on: scenarios by seed, and environments to play them in. `own_scenario` gives those
    that need the capability, on seeds of their own; `own` tells them from retention scenarios; `advice` is a
    worked example that one may be shown with (none: nothing to show)."""

    @property
    def spec(self) -> TrainingSpec: ...
    def scenario(self, seed: int) -> TargetTask: ...
    def own_scenario(self, seed: int) -> TargetTask: ...
    def own(self, task: TargetTask) -> bool: ...
    def advice(self, task: TargetTask) -> Sequence[Message]: ...
    def environment(self) -> Environment: ...


class Keeper(Protocol):
    """Opens something once a round, and closes it with the round (`Context.keep`)."""

    def __call__(self, name: str, make: Callable[[], WrittenEnvironment]) -> WrittenEnvironment: ...


def composes(settings: Settings, target: Target) -> bool:
    """Whether a round composes its environments of the target's generators."""
    return settings.synthesizer.kind != "llm" and isinstance(target, Generators)


def can_train(settings: Settings, target: Target) -> bool:
    """Whether a round can have environments to train in: composed ones, or those that a model writes."""
    return settings.synthesizer.kind == "llm" or composes(settings, target)


def compose(
    target: Target, at: Round, capability: str, success: Mapping[str, float], retention_share: float, version: int = 1
) -> ComposedEnvironment:
    """The environment of a capability, from the generators of `target`; `success` is that of what is live, by family.

    Its families need the capability, are not mastered, and otherwise need only what the base has shown; retention
    families are all others in which what is live has any success and that no single answer solves: there what always
    does the same would be paid for it, and what is trained drifts to it. A family is never in both.
    """
    assert isinstance(target, Generators)
    families = target.families()
    shown = {c for name, needs in families.items() if success.get(name, 0.0) >= MASTERED for c in needs}
    needing = sorted(n for n, needs in families.items() if capability in needs and success.get(n, 0.0) < MASTERED)
    alone = [n for n in needing if set(families[n]) - {capability} <= shown]
    own = alone or needing or sorted(n for n, needs in families.items() if capability in needs)
    return composed_of(target, at, capability, own, success, retention_share, version)


def composed_of(
    target: Target,
    at: Round,
    name: str,
    own: Sequence[str],
    success: Mapping[str, float],
    retention_share: float,
    version: int = 1,
) -> ComposedEnvironment:
    """An environment about the families `own`, with retention families as `compose` has them."""
    assert isinstance(target, Generators)
    others = sorted(n for n in target.families() if n not in own and success.get(n, 0.0) > 0)
    alike = _one_answer_families(target, others)
    retention = tuple(n for n in others if n not in alike)
    share = retention_share if retention else 0.0
    return ComposedEnvironment(
        target, CompositionSpec(at.target, at.data_hash, name, tuple(own), retention, share, version, seed=at.seed)
    )


def _one_answer_families(target: Target, families: Sequence[str]) -> set[str]:
    """Those of `families` in which one answer solves every scenario. A seed for which a generator raises is passed over
    for one that no other scenario has, here as in `drawing.py`."""
    assert isinstance(target, Generators)
    seeds = range(PROBED + 1)
    environment = target.environment()
    try:
        made = {f: [first_made(partial(target.generate, f), count(s, len(seeds))) for s in seeds] for f in families}
        return {family for family, tasks in made.items() if one_answer(environment, tasks)}
    finally:
        environment.close()


def contrasted(environment: ComposedEnvironment) -> tuple[ComposedEnvironment, Contrast | None, str]:
    """(environment, which of its scenarios are for contrast, why there are none though there should be).

    Where one answer solves whatever needs the capability (declining, handing over), half of the scenarios are retention
    scenarios: what always does the same would otherwise be paid for nearly everything. Any other is left as it is. The
    generalist's is about families of both kinds, and constants have to lose those in which no one answer is right.
    """
    if environment.spec.capability == GENERALIST:
        alike = _one_answer_families(environment.target, environment.spec.families)
        return environment, Contrast(lambda task: task.family not in alike, many=True) if alike else None, ""
    playing = environment.environment()
    try:
        if not one_answer(playing, [environment.own_scenario(seed) for seed in range(PROBED + 1)]):
            return environment, None, ""
    finally:
        playing.close()
    spec = environment.spec
    if not spec.retention_share:
        reason = (
            f"one answer solves every scenario of {spec.capability!r}, and there are none beside them in which it is "
            "wrong: what is live solves no other family, or calibration.retention_share is 0"
        )
        return environment, None, reason
    beside = environment.retaining(spec.retention_families, max(spec.retention_share, SHARE))
    return beside, Contrast(lambda task: not beside.own(task)), ""


def validated(composed: ComposedEnvironment, limits: Limits) -> tuple[ComposedEnvironment, ValidationVerdict]:
    """The environment with the scenarios for contrast that it needs, and the verdict of its checks."""
    try:
        environment, contrast, alone = contrasted(composed)
    except (EnvironmentFault, TargetError) as fault:
        return composed, ValidationVerdict(False, (f"contrast: {fault}",), {})
    content = getattr(composed.target, "content", None)
    verdict = validate_environment(
        environment.environment, environment.scenario, limits, contrast=contrast, content=content
    )
    reasons = [*([alone] if alone else []), *verdict.reasons, *_not_apart(environment, verdict)]
    return environment, replace(verdict, accepted=verdict.accepted and not reasons, reasons=tuple(reasons))


def _not_apart(environment: ComposedEnvironment, verdict: ValidationVerdict) -> list[str]:
    """Why the scenarios that were looked at are not apart; nothing where there was none to look at."""
    searched = verdict.figures.get("scenarios", {}).get("searched", 0)
    try:
        scenarios = [environment.scenario(seed) for seed in range(searched)]
        return not_apart(environment.target, scenarios) if scenarios else []
    except OUTSIDE:
        raise
    except FAULTS as error:  # the target's own code may raise anything
        return [raised("scenarios", error)]


def stored_environment(
    store: Store, at: Round, target: Target, capability: str, keep: Keeper
) -> ComposedEnvironment | WrittenEnvironment:
    """The environment of a capability as it was stored by the stage `synthesize`: its last version."""
    rows = store.rows(EnvironmentRow, round_id=at.id, capability_id=row_id(at.id, capability))
    if any(row.kind == "llm" for row in rows):
        return accepted_environment(store, at, target, capability, keep)
    last = max(rows, key=lambda row: row.version)
    spec: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in last.spec.items()}
    return ComposedEnvironment(target, CompositionSpec(**spec))


def families_of(context: Context, capability: str) -> Sequence[str]:
    """The target's families that a capability's environment is about. A module's own scenarios have families beside
    them of which the target has no task: nothing can be drawn of one, or judged on it."""
    target = context.target
    about = stored_environment(context.store, context.round, target, capability, context.keep).spec.families
    known = {task.family for split in SPLITS for task in target.tasks(split)}
    known |= set(target.families()) if isinstance(target, Generators) else set()
    return tuple(family for family in about if family in known) or about
