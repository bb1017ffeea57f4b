"""What an adapter is trained on, and what its checkpoints are looked at for: whether what they have learnt carries over
to the target, and which of them becomes the adapter (method, section 5)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from db import AdapterRow
from environments.contract import TargetTask
from errors import AdapterError, NotFinite, Untrainable
from models.adapters.fingerprint import Fingerprint
from models.adapters.loading import fingerprint_on
from models.training.grpo import TrainingResult
from models.training.records import MADE, Dialled, come_apart
from models.training.rollouts import PlayedBefore
from tasks.round.adapters import keep_proof, kept_proof
from tasks.round.context import Context
from tasks.round.engine import Playground
from tasks.round.results import StartFigures, TransferFigures
from tasks.round.rollouts import outcomes
from tasks.synthesis.choosing import (
    Choice,
    candidates,
    finished,
    fresh_scenarios,
    loaded,
    pick,
    play_checkpoint,
)
from tasks.synthesis.environments import TrainingEnvironment
from tasks.synthesis.transfer import failed_tasks, target_episodes, transfer_of

logger = logging.getLogger("trace")


@dataclass(frozen=True)
class Course:
    """What an adapter is trained on, and as what it is stored. `name` is the capability, or another name that is unique
    in the round; `folder` is where the training keeps its files. `steps`, `solved` and `patience` follow from the
    settings where they are not given; `hinted`: with advice; `judged` as in `TrainingSettings`;
    `transfers`: whether it is tried on the target early. What is trained for no
    capability (a mixture, the target itself) has no ids of it. `starts` is what was compared to begin from, `keeps` are
    families that the environment has for the sake of what was chosen, `began` says why that is not the champion ("": it
    is, or there is none), `ready` is what was played of its first step already."""

    name: str
    environment: TrainingEnvironment
    adapter: str
    folder: Path
    steps: int | None = None
    hinted: bool = False
    patience: int | None = None
    solved: float | None = None
    capability_id: str | None = None
    environment_id: str | None = None
    judged: bool = True
    transfers: bool = True
    starts: tuple[StartFigures, ...] = ()
    keeps: tuple[str, ...] = ()
    began: str = ""
    ready: PlayedBefore = field(default_factory=PlayedBefore)


def tasks_to_try(context: Context, course: Course) -> list[TargetTask]:
    """The target's tasks that a training is checked on early. None where it is for no single capability, where that is
    switched off, and where methods compete: each may spend its episodes only as it says."""
    switched_off = not (course.transfers and context.settings.train.transfer)
    if course.capability_id is None or switched_off or context.budget is not None:
        return []
    return failed_tasks(context.stored, course.name, context.tasks("diagnosis"))


def check_transfer(
    context: Context, course: Course, result: TrainingResult, tasks: Sequence[TargetTask], third: int, warm: bool
) -> TransferFigures | None:
    """What the weights after step `third` (or the last one, where there are fewer) have brought in the environment and
    on `tasks` of the target; what is stored is not played again. None where there are no such weights, or they have
    come apart."""
    if not result.records or result.verdict:
        return None
    settings, step, number, name = context.settings, min(third, result.last), context.round.number, course.name
    ground = context.training_ground(course.environment.spec.id, course.environment.environment, course.adapter)
    own, _ = fresh_scenarios(course.environment, settings.train.choosing, number)
    start = finished(_played_with(context, ground, result.weights[0] if warm else None, own, name))
    target = apart(context.ground("transfer"), course.adapter)
    try:
        now = finished(_played_with(context, ground, result.weights[step], own, name))
        with loaded(context, result.weights[step], name) as adapter:
            episodes = target_episodes(tasks, settings.train.transfer, context.seed, adapter)
            tried = outcomes(context.store, context.engine.play(target, episodes, f"try {name} on the target"))
    except NotFinite as problem:
        logger.warning("it is not known whether %s carries over: %s", name, problem)
        return None
    if start.empty or now.empty or tried.empty:
        logger.warning("it is not known whether %s carries over: all episodes of a side were lost to errors", name)
        return None
    return transfer_of(step, start, now, tried)


def apart(ground: Playground, adapter: str) -> Playground:
    """The target's ground for weights that may become another adapter than this one. As that they play these tasks
    again for the router (`tasks/routing/examples.py`): under the same ids they would count as played, and be missing
    there."""
    return replace(ground, adapter_id=adapter, scope=f"{ground.where}|{ground.purpose}")


def _played_with(
    context: Context, ground: Playground, folder: Path | None, tasks: Sequence[TargetTask], capability: str
) -> pd.DataFrame:
    """All outcomes of a checkpoint's weights (None: the base) on `tasks`; it is loaded for that alone."""
    with loaded(context, folder, capability) as name:
        return play_checkpoint(context.engine, ground, tasks, context.seed, name)


def choose(
    context: Context,
    identity: str,
    environment: TrainingEnvironment,
    result: TrainingResult,
    warm: bool,
) -> Choice:
    """Play what the training began from and the checkpoints worth it on fresh seeds, at the temperature of evaluation.

    The last is taken as it is where no step or no more than one was to be made, where `train.candidates` is 1, and
    where its environment taught the wrong thing. One that ended after a single step of several is compared with what it
    began from, as others are. Those that have come apart are left out; raises `Untrainable` where all have, and
    `ModuleError` where a written module loses every episode of one.
    """
    settings = context.settings
    steps = candidates(result.records, settings.train.candidates) if result.records else []
    alone = len(steps) < 2 and (settings.train.candidates < 2 or result.ending == MADE)
    if not steps or alone or result.verdict:
        return Choice(result.last, ())
    ground = context.training_ground(environment.spec.id, environment.environment, identity)
    if isinstance(environment, Dialled):  # where training ended: at the level it began at, all may succeed by now
        environment = environment.at(result.records[-1].level)
    own, retention = fresh_scenarios(environment, settings.train.choosing, context.round.number)
    played, names = {}, {task.id for task in own}
    for step in (0, *steps):
        folder = result.weights[step] if step or warm else None  # an adapter that begins from zero is the base
        try:
            frame = _played_with(context, ground, folder, [*own, *retention], environment.spec.capability)
            played[step] = finished(frame, names, f"what step {step} is worth")
        except NotFinite as problem:
            if not step:  # the base, or what has trained without a word
                raise
            logger.warning("step %d of %s is left out: %s", step, environment.spec.capability, problem)
    if len(played) < 2:
        raise come_apart(steps[0])
    return pick(played, own)


def check_alive(context: Context, capability: str, identity: str) -> None:
    """Raise `Untrainable` for an adapter that changes nothing, or whose weights have come apart: nothing of it could be
    registered, and that would end the round. What shows that it does is kept, and weights are probed once."""
    row = context.store.row(AdapterRow, id=identity)
    assert row is not None, "it was trained"
    if kept_proof(row) is not None:
        return
    try:
        with loaded(context, context.files.fetch(row.path), capability) as name, context.model:
            assert name is not None
            proof = _proof(context, name)
    except NotFinite as problem:
        raise Untrainable(str(problem)) from problem
    keep_proof(context.store, row, proof)


def _proof(context: Context, name: str) -> Fingerprint:
    """Apart from loading, whose own `AdapterError` says that a server is broken."""
    try:
        return fingerprint_on(context.policy, context.probe, name)
    except AdapterError as problem:
        raise Untrainable(str(problem)) from problem
