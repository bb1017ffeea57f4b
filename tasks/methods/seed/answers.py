"""What a method made in the end, and playing it: the one way in which every method is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from environments.contract import TargetTask
from errors import PolicyError
from models.adapters.files import adapter_digest
from models.adapters.loading import load_folder
from models.policy import MessagePolicy
from tasks.measuring.lineup import BARE_BASE, Lineup, Trials, held, play_alone, play_lineup
from tasks.methods.seed.budget import Account
from tasks.methods.seed.prompts import Prompting, prompted
from tasks.round.context import Context
from tasks.round.rollouts import episodes_for, outcomes

# Tasks of a shift test that a comparison plays: enough for an interval of seven points.
SHIFT_TASKS = 200


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a training after `episodes` of its method's budget, in a folder as PEFT writes it."""

    episodes: int
    adapter: str
    folder: Path


@dataclass(frozen=True)
class Answer:
    """What answers the target's users if a method is believed; by default the bare base.

    `lineup` has the adapters and the router. `families` decides instead of a router: which of the lineup's adapters
    answers a task, by its family (the others are left to the base). `prompting` changes the base's prompt. `scripted`
    is a policy without a model, which answers instead of all that. `notes` say what a reader of the figures has to
    know. `nested` are the lineup's capabilities in the order in which they count; `trained` are the capabilities that
    adapters were trained for. `context` is the round in whose home it plays. `shared_seconds` are seconds of work that
    it used and that its account has not, `shared_dollars` what language models cost in it. `account` is the one in that
    home, where it is not the method's own. `checkpoints` are of the training, for the curve over episodes. `reflection`
    says what wrote its prompts (`reflection_of`), where something has.
    """

    context: Context
    lineup: Lineup = BARE_BASE
    families: Mapping[str, str] | None = None
    prompting: Prompting = field(default_factory=Prompting)
    scripted: MessagePolicy | None = None
    notes: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    shared_seconds: float = 0.0
    shared_dollars: float = 0.0
    account: Account | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    reflection: Mapping[str, Any] | None = None


def test_tasks(context: Context) -> Sequence[TargetTask]:
    """The test tasks on which the methods of a seed are compared."""
    return context.drawing.compared_on[0]


test_tasks.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def shift_tasks(context: Context) -> Sequence[TargetTask]:
    """The first tasks of the shift test that the methods of a seed are compared on; none where the target has none."""
    return context.drawing.compared_on[1][:SHIFT_TASKS]


def one_adapter(context: Context, name: str, adapter: str) -> Answer:
    """One adapter that answers every task."""
    tasks = [*context.tasks("validation"), *test_tasks(context), *shift_tasks(context)]
    families = {task.family for task in tasks}
    return Answer(context, Lineup({name: adapter}), dict.fromkeys(families, name))


def play_answer(answer: Answer, tasks: Sequence[TargetTask], trials: int, what: str) -> list[str]:
    """Trajectory ids of every task played `trials` times with the seed of the settings; stored ones are not played
    again."""
    context, seed = answer.context, answer.context.settings.seed
    if answer.scripted is not None:  # it does not draw: one trial tells all
        engine = context.engine_of(answer.scripted)
        name = answer.scripted.identity().base
        return engine.play(context.ground("evaluation"), episodes_for(tasks, 1, seed), f"{name} on {what}")
    if not answer.prompting.is_none:
        ground = prompted(context, answer.prompting, "evaluation")
        return context.engine.play(ground, episodes_for(tasks, trials, seed), f"prompted base on {what}")
    if answer.families is None:
        return play_lineup(context, answer.lineup, Trials(tasks, trials, seed), what).ids
    ids = []
    for name in ("", *answer.lineup.members):
        mine = [t for t in tasks if answer.families.get(t.family, "") == name]
        if not mine:
            continue
        owed = Trials(mine, trials, seed)
        if name:
            ids += play_alone(context, name, answer.lineup.members[name], owed, what)
        else:
            ids += play_lineup(context, BARE_BASE, owed, what).ids
    return ids


def play_checkpoint(answer: Answer, checkpoint: Checkpoint, tasks: Sequence[TargetTask], trials: int) -> list[str]:
    """Trajectory ids of every task answered by the weights of a checkpoint."""
    context = answer.context
    name = load_folder(
        context.policy, checkpoint.folder, "checkpoint", context.round.id, adapter_digest(checkpoint.folder)
    )
    with held(context, name):
        ground = replace(context.ground("evaluation"), adapter_id=checkpoint.adapter)
        episodes = episodes_for(tasks, trials, context.settings.seed, name)
        return context.engine.play(ground, episodes, f"test after {checkpoint.episodes} episodes")


def first_of(answer: Answer, count: int) -> Answer:
    """The answer with the first `count` of its capabilities alone: what is routed to another is left to the base."""
    members = {name: answer.lineup.members[name] for name in answer.nested[:count]}
    return replace(answer, lineup=replace(answer.lineup, members=members) if members else BARE_BASE)


def successes(answer: Answer, ids: Sequence[str]) -> dict[str, list[float | None]]:
    """Outcome of each trial by task, 1 or 0; None for an episode that was lost to the infrastructure. What the policy
    itself could not answer it has not solved."""
    columns = ["task_id", "trial", "success", "error_boundary"]
    frame = answer.context.store.trajectory_frame(None, id=list(ids), columns=columns)
    found: dict[str, list[float | None]] = {}
    for row in frame.sort_values(["task_id", "trial"]).itertuples():
        ended = 0.0 if row.error_boundary == PolicyError.boundary else row.success
        found.setdefault(str(row.task_id), []).append(None if pd.isna(ended) else float(ended))
    return found


def success_of(context: Context, ids: Sequence[str]) -> float:
    """Mean over tasks of each task's success; 0 where no episode has an outcome. What the policy itself could not
    answer, as behind a prompt that leaves a task no room, is no success: something is chosen by this, and would be
    taken for what it does on the rest."""
    frame = outcomes(context.store, ids, lost=True)
    frame["success"] = frame["success"].where(frame["error_boundary"] != PolicyError.boundary, 0.0)
    known = frame.dropna(subset=["success"])
    return float(known.groupby("task")["success"].mean().mean()) if len(known) else 0.0
