"""Which weights a training begins from, with `train.carry`: those that do best on fresh scenarios of its environment.

Without it a training begins from the capability's champion, or from zero, and the trainings of a round share nothing.
What is compared are the base, the champion, the adapters that this round trained before and the other members of the
release that it goes on from. A round trains one capability after another, those first that its calibration found the
easiest: what they teach is there for the harder ones. So what there is to compare follows from what is stored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from db import GENERALIST, AdapterRow, CalibrationRow, row_id
from environments.contract import Generators, TargetTask
from environments.sandbox.workers import ModuleError
from environments.synthesized.composed import ComposedEnvironment
from environments.synthesized.written import WrittenEnvironment
from errors import AdapterError, EnvironmentFault, NotFinite
from models.adapters.files import CONFIG, adapter_digest
from models.episodes import Episode
from models.training.lora import target_modules
from models.training.records import TrainingSettings
from settings_parts import TrainSettings
from tasks.measuring.lineup import champion_of, held, load_member, members_of, stored_member
from tasks.round.adapters import BEFORE_PRACTICE, adapter_id, before_practice, families_about
from tasks.round.context import Context
from tasks.round.results import (
    CalibrateResult,
    RegisterResult,
    SelectResult,
    StartFigures,
    SynthesizeResult,
    TrainResult,
)
from tasks.round.rollouts import outcomes
from tasks.synthesis.calibration import CARRY_SEED, focus_weights
from tasks.synthesis.choosing import WORSE, falls, finished, fresh_scenarios, part_of
from tasks.synthesis.environments import TrainingEnvironment

# Adapters that are compared with the base at most: each costs as much as a checkpoint that is tried.
MOST = 5
# What the trajectories of these episodes are grouped by.
START = "start"
logger = logging.getLogger("trace")


@dataclass(frozen=True)
class Start:
    """An adapter that a training may begin from: the capability that it is for, its id, and its folder."""

    capability: str
    adapter: str
    folder: Path


def other_shape(adapter: AdapterRow, wanted: TrainingSettings | TrainSettings) -> str:
    """Why an adapter's weights cannot be trained on; "" when they can."""
    for name in ("rank", "alpha", "upper_layers"):
        given, ours = adapter.config.get(name), getattr(wanted, name)
        if given != ours:
            return f"has {name} {given}, train.{name} is {ours}"
    return ""


def other_modules(context: Context, folder: Path) -> str:
    """Why the weights in an adapter's folder cannot be trained on: they change other layers than a training does today,
    as those of an earlier version where a base has experts or fused projections; "" when they can."""
    given = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("target_modules") or ()
    ours = target_modules(context.base.policy.model)
    return "" if set(given) == set(ours) else f"changes {', '.join(sorted(given))}, a training {', '.join(ours)}"


def trainable_champion(context: Context, capability: str) -> str | None:
    """Id of the champion that a training may begin from by its shape; None where there is none, or one of another."""
    champion = champion_of(context, capability)
    row = context.store.row(AdapterRow, id=champion) if champion else None
    if champion is None or row is None:
        return champion
    if other_shape(row, context.settings.train):
        return None
    return None if other_modules(context, stored_member(context, capability, champion)[1]) else champion


def champion_start(context: Context, capability: str, wanted: TrainingSettings) -> tuple[Start | None, str]:
    """The champion to train on, or why the one that there is cannot be (""; without one there is nothing to say).
    Raises `AdapterError` for one whose files were changed."""
    champion = champion_of(context, capability)
    if champion is None:
        return None, ""
    row, folder = stored_member(context, capability, champion)
    if adapter_digest(folder) != row.sha256:
        raise AdapterError(
            f"the champion of {capability!r} in {folder} is not what was stored ({row.sha256[:16]}...): its files were "
            "changed; restore them, or roll back to a release without it ('trace-agent history' lists them)"
        )
    if other := other_shape(row, wanted) or other_modules(context, folder):
        other = f"its champion {other}"
        logger.warning("%s is not trained on from its champion: %s", capability, other)
        return None, other
    return Start(capability, champion, folder), ""


def starts_of(
    context: Context,
    adapter: str,
    environment: TrainingEnvironment,
    wanted: TrainingSettings,
    champion: Start | None,
) -> tuple[StartFigures, ...]:
    """What the training of `adapter` may begin from, compared once: one that has begun goes on from what it began from.
    Empty where there is nothing but the base."""
    begun = context.store.row(AdapterRow, id=adapter)
    if begun is not None:
        return tuple(StartFigures(**figures) for figures in begun.config.get("starts", ()))
    capability = environment.spec.capability
    starts = starts_for(context, capability, wanted, champion)
    if not starts:
        return ()
    return tuple(compare_starts(context, environment, starts))


def chosen_start(context: Context, figures: Sequence[StartFigures]) -> Start | None:
    """The adapter to begin from; None for the base."""
    for chosen in (f for f in figures if f.chosen and f.adapter):
        return Start(chosen.capability, chosen.adapter, stored_member(context, chosen.capability, chosen.adapter)[1])
    return None


def families_to_keep(context: Context, environment: TrainingEnvironment, start: Start | None) -> tuple[str, ...]:
    """The families that the adapter in `start` was trained for, and what it was to keep itself, as far as training in
    `environment` would not keep them: what is live need not succeed at them. None where they cannot be drawn."""
    if start is None or not isinstance(environment, ComposedEnvironment | WrittenEnvironment):
        return ()
    # What the generalist practised from was made for the same families, and has no environment of its own.
    generalist = adapter_id(context.round.id, GENERALIST)
    row = context.store.row(AdapterRow, id=generalist if start.capability == BEFORE_PRACTICE else start.adapter)
    if row is None or not context.settings.calibration.retention_share:
        return ()
    if not isinstance(environment.target, Generators):
        return ()
    learnt = {*families_about(context.store, row), *row.config.get("keeps", ())} & set(environment.target.families())
    return tuple(sorted(learnt - {*environment.spec.families, *environment.spec.retention_families}))


def keeping(context: Context, environment: TrainingEnvironment, families: Sequence[str]) -> TrainingEnvironment:
    """`environment` with retention scenarios of `families` too; its id is another, the stored one stays as it is."""
    if not families or not isinstance(environment, ComposedEnvironment | WrittenEnvironment):
        return environment
    share = environment.spec.retention_share or context.settings.calibration.retention_share
    return environment.retaining(tuple(sorted({*environment.spec.retention_families, *families})), share)


def focused(context: Context, capability: str, environment: TrainingEnvironment) -> TrainingEnvironment:
    """`environment` as it is trained on; with `train.focus` its families are drawn by what there is to learn in each:
    the variance of success that calibration found, or the diagnosis where that had no scenario of it, or with advice
    at least that of a family which still gets it, and a little for all. A group of rollouts that all succeed, or all
    fail, teaches nothing."""
    if not context.settings.train.focus or not isinstance(environment, ComposedEnvironment):
        return environment
    measured = _calibrated(context, capability)
    if measured is None:
        return environment
    found = {**(measured.detail.get("known") or {}), **measured.detail.get("families", {})}
    hinted = measured.detail.get("hinted") is not None
    return environment.weighing(focus_weights(environment.spec.families, found, hinted))


def _calibrated(context: Context, capability: str) -> CalibrationRow | None:
    made = context.result(SynthesizeResult, capability).environment
    return context.store.row(CalibrationRow, id=row_id(made, "calibration"))


def starts_for(context: Context, capability: str, wanted: TrainingSettings, champion: Start | None) -> list[Start]:
    """The adapters that the training for `capability` may begin from, in the order in which equals are taken: its
    champion, this round's from the latest to the first, what its generalist practised from, other members of the live
    release by name. At most MOST, the
    live generalist always among them: calibration may have found that it is the one which can learn here. What is left
    out is logged with the reason; a blend is no adapter that was trained."""
    found = [champion] if champion else []
    members = {c: identity for c, identity in members_of(context.parent).items() if c != capability and identity}
    before = before_practice(context.store, context.round.id)
    earlier = [(BEFORE_PRACTICE, before.id)] if before else []
    for other, identity in (*_trained_before(context, capability), *earlier, *sorted(members.items())):
        reason, start = _usable(context, other, identity, wanted)
        if start is None:
            logger.warning("%s cannot begin from the adapter for %s: %s", capability, other, reason)
        else:
            found.append(start)
    places = sorted(range(len(found)), key=lambda i: (found[i].adapter != members.get(GENERALIST), i))
    kept = [found[i] for i in sorted(places[:MOST])]
    if left := ", ".join(start.capability for start in found if start not in kept):
        logger.info("%s: beside the base only %d adapters are compared, left out: %s", capability, MOST, left)
    return kept


def training_order(context: Context, capabilities: Sequence[str]) -> list[str]:
    """The order in which a round trains these calibrated capabilities: as given, and with `train.carry` those first
    that the policy succeeds at most often, then those that it does with advice."""
    if not context.settings.train.carry:
        return list(capabilities)
    found = {c: context.result(CalibrateResult, c) for c in capabilities}
    return sorted(capabilities, key=lambda c: (-found[c].success_rate, -(found[c].hinted or 0.0)))


def _trained_before(context: Context, capability: str) -> Iterator[tuple[str, str]]:
    """Capability and adapter id of the round's other trainings that are done and have something to show. An adapter
    that is no better than what it began from is not among them, nor one whose module lost what was to measure it."""
    selected = context.result(SelectResult).selected
    trained = {c: found for c in selected if c != capability and (found := context.found(TrainResult, c)) is not None}
    # The generalist is among them where the others went on from it; of how early it was its calibration says nothing.
    first = [c for c in trained if c == GENERALIST]
    for other in reversed([*first, *training_order(context, [c for c in trained if c != GENERALIST])]):
        if trained[other].goes_on and context.stored.goes_on(RegisterResult, other) is not False:
            yield other, trained[other].adapter


def _usable(context: Context, other: str, identity: str, wanted: TrainingSettings) -> tuple[str, Start | None]:
    """The adapter, or why it cannot be begun from."""
    try:
        row, folder = stored_member(context, other, identity)
        if reason := other_shape(row, wanted):
            return f"it {reason}", None
        if adapter_digest(folder) != row.sha256:
            return f"{folder} is not what was stored ({row.sha256[:16]}...): its files were changed", None
        if reason := other_modules(context, folder):
            return f"it {reason}", None
    except AdapterError as problem:
        return str(problem), None
    return "", Start(other, identity, folder)


def compare_starts(context: Context, environment: TrainingEnvironment, starts: Sequence[Start]) -> list[StartFigures]:
    """The base and `starts`, each on the same fresh scenarios of `environment` at the temperature of evaluation; one of
    them is chosen. What is stored is not played again. One whose weights have come apart, or with which a written
    module loses every episode, is left out. Raises `ModuleError` where it loses every one with the base, and
    `EnvironmentFault` when every episode of one was lost to anything else."""
    own, retention = fresh_scenarios(environment, context.settings.train.choosing, context.round.number, CARRY_SEED)
    tasks, names = [*own, *retention], {task.id for task in own}
    what = "what {} is worth as a start"
    base = finished(_played(context, environment, None, tasks), names, what.format("the base"))
    frames: list[tuple[Start | None, pd.DataFrame]] = [(None, base)]
    for start in starts:
        try:
            frame = _played(context, environment, start, tasks)
            frames.append((start, finished(frame, names, what.format(start.capability))))
        except (NotFinite, ModuleError) as problem:
            logger.warning("%s cannot begin from %s: %s", environment.spec.capability, start.capability, problem)
    figures = [figures_of(start, frame, base, names) for start, frame in frames]
    measured = _calibrated(context, environment.spec.capability)
    detail = measured.detail if measured else {}
    return choose(figures, detail.get("start") if detail.get("hinted") is not None else None)


def _played(
    context: Context, environment: TrainingEnvironment, start: Start | None, tasks: Sequence[TargetTask]
) -> pd.DataFrame:
    name = load_member(context, start.capability, start.adapter) if start else None
    ground = context.training_ground(environment.spec.id, environment.environment, start.adapter if start else "")
    ground = replace(ground, group=START)
    episodes = [Episode("", task, context.seed, 0, name) for task in tasks]
    with held(context, name):
        ids = context.engine.play(ground, episodes, f"choose a start: {start.capability if start else 'base'}")
    return outcomes(context.store, ids, lost=True)


def figures_of(start: Start | None, frame: pd.DataFrame, base: pd.DataFrame, own: set[str]) -> StartFigures:
    """What a start came to on the scenarios; `own` are the names of the capability's own. None is the base."""
    if frame.empty:
        raise EnvironmentFault(
            f"all episodes that were to show what {start.capability if start else 'the base'} is worth as a start were "
            "lost to errors; their trajectories say why"
        )
    mine, others = part_of(frame, own, True), part_of(frame, own, False)
    return StartFigures(
        capability=start.capability if start else "",
        adapter=start.adapter if start else "",
        success=float(frame["success"].mean()),
        own=float(mine["success"].mean()) if len(mine) else None,
        retention=float(others["success"].mean()) if len(others) else None,
        reward=float(frame["reward"].mean()),
        forgets=start is not None and falls(part_of(base, own, False), others, WORSE),
        worse=start is not None and falls(base, frame, WORSE),
    )


def choose(figures: Sequence[StartFigures], advised: str | None = None) -> list[StartFigures]:
    """The figures, the base's first, with what is begun from marked: of the adapters the best on all scenarios by
    success, then by reward, then the earlier one. Those that forget what the base can do (the rule for checkpoints,
    too) or are worse than it (WORSE) count for nothing, and without any other the base is begun from: a few scenarios
    hardly tell an adapter from the base, and what an adapter has learnt of the target is lost with it.

    Where training will give advice, `advised` is the adapter ("": the base) that was seen to succeed with it: others,
    which may not follow it, count only where they succeed on more of the capability's own scenarios without."""
    base, *adapters = figures
    fit = [f for f in adapters if not f.forgets and not f.worse]
    if advised is not None:
        shown = next((f.own or 0.0 for f in figures if f.adapter == advised), 0.0)
        fit = [f for f in fit if f.adapter == advised or (f.own or 0.0) > shown]
    best = max(fit, key=lambda f: (f.success, f.reward), default=base)
    return [f.model_copy(update={"chosen": f is best}) for f in figures]


def start_config(
    digest: str, figures: Sequence[StartFigures], keeps: Sequence[str], began: str = ""
) -> dict[str, object]:
    """What the store keeps of a beginning: the digest of the weights ("": from zero), what was compared, the families
    that are kept for the start's sake, and why it was not the champion (`began`)."""
    config: dict[str, object] = {"start": digest} if digest else {}
    config |= {"began": began} if began else {}
    if figures:
        chosen = next(f for f in figures if f.chosen)
        config |= {"start_adapter": chosen.adapter, "starts": [f.model_dump() for f in figures], "keeps": list(keeps)}
    return config


def start_params(figures: Sequence[StartFigures]) -> dict[str, str]:
    """What was chosen, as parameters of MLflow."""
    chosen = next(f for f in figures if f.chosen)
    return {"start/from": chosen.capability or "base", "start/adapter": chosen.adapter or "none"}


def start_metrics(figures: Sequence[StartFigures]) -> dict[str, float]:
    """The figures as metrics of MLflow, by what was compared."""
    found = {
        f"start/{f.capability or 'base'}_{name}": getattr(f, name)
        for f in figures
        for name in ("success", "own", "retention", "reward")
    }
    return {name: value for name, value in found.items() if value is not None}
