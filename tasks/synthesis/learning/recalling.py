"""Learning from what has succeeded: the episodes of a round that count as successes to learn from, and one adapter that
learns from all of them, without an episode more (`models/training/recall.py`). The generalist is made so, and what
stands beside TRACE as the cheapest training (`tasks/methods/iterated.py`).

What was shown advice is learnt as if there had been none. Validation, test and the fresh seeds that adapters are
measured on are never learnt from.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from db import AdapterRow, Store, TrajectoryRow, row_id
from environments.contract import Message, Prompt
from environments.picking import in_turn
from errors import NotFinite
from models.adapters.loading import check_finite
from models.adapters.runs import RunLog
from models.renderer import Conversation, Renderer
from models.training.grpo import recall_adapter
from models.training.recall import recall_steps
from models.training.records import StepRecord, TrainingSettings, come_apart
from tasks.measuring.lineup import TRIED
from tasks.round.adapters import adapter_id, begin_adapter, finish_adapter
from tasks.round.context import Context
from tasks.round.target_prompt import first_opening
from tasks.synthesis.calibration import HINT
from tasks.unattended.progress import Meter, Stopwatch

logger = logging.getLogger("trace")

# Successes that are learnt from: of a scenario, so that no one is learnt by heart, and of a family, so that none of
# those that trainings have played a thousand times outweighs those that were hardly met.
EACH, FAMILY = 4, 40
# What the episodes were played for. Evaluation measures, and must not be learnt from.
LEARNT_FROM = ("diagnosis", "calibration", "training", "transfer", TRIED)
COLUMNS = ["id", "purpose", "success", "adapter_id", "group_id", "task_id", "family", "environment", "created_at"]


@dataclass(frozen=True)
class Learnt:
    """An adapter that learnt from successes, the steps that it took, and MLflow's run, which is open."""

    adapter: AdapterRow
    steps: int
    run: str


def successes(context: Context, without: str = "") -> list[TrajectoryRow]:
    """The round's successes that are learnt from (`picked`), `without` those in an environment. Of trainings, those for
    the round's capabilities alone."""
    own = {row.id for row in context.store.rows(AdapterRow, round_id=context.round.id) if row.capability_id}
    frame = context.store.trajectory_frame(context.round.id, columns=COLUMNS, purpose=list(LEARNT_FROM))
    frame = frame[frame["environment"].ne(without)]
    frame = frame[frame["purpose"].isin(("diagnosis", "calibration")) | frame["adapter_id"].isin(own)]
    if context.settings.synthesizer.kind == "llm":  # a written environment's own prompt is not known here
        frame = frame[frame["group_id"].ne(HINT)]
    return behind_known_prompts(context, picked(context.store, frame))


def picked(store: Store, frame: pd.DataFrame) -> list[TrajectoryRow]:
    """Of the episodes in `frame` (COLUMNS) successes, no two of them alike: at most EACH of a scenario, and of a family
    FAMILY, of as many of its scenarios as there are, the latest first."""
    frame = frame[frame["success"].fillna(False).astype(bool)].sort_values(["created_at", "id"], ascending=False)
    rows = {row.id: row for row in store.trajectories(None, with_blobs=True, id=list(frame["id"]))}
    found: list[TrajectoryRow] = []
    for _, family in frame.groupby("family"):
        scenarios = [
            _unlike([rows[i] for i in scenario["id"] if i in rows])[:EACH]
            for _, scenario in family.groupby("task_id", sort=False)
        ]
        found += in_turn(scenarios)[:FAMILY]
    return found


def behind_known_prompts(context: Context, rows: Sequence[TrajectoryRow]) -> list[TrajectoryRow]:
    """Episodes whose prompt is known: all that were played without advice, and of the others those behind the prompt of
    the target's first task. What one that has a prompt of its own shows without its advice is stored nowhere."""
    if not any(row.group_id == HINT for row in rows):
        return list(rows)
    plain = context.base.renderer.start(*first_opening(context.target))
    shown = plain.ids[: plain.shared]

    def is_known(row: TrajectoryRow) -> bool:
        return row.group_id != HINT or (row.token_ids is not None and list(row.token_ids[: len(shown)]) == shown)

    known = list(filter(is_known, rows))
    if left := len(rows) - len(known):
        logger.warning("%d successes with advice are not learnt from: their tasks have prompts of their own", left)
    return known


def _unlike(rows: Sequence[TrajectoryRow]) -> list[TrajectoryRow]:
    """Of equal conversations the first; without those that have no sampled tokens."""
    found: dict[str, TrajectoryRow] = {}
    for row in rows:
        if row.sampled_mask is not None:
            found.setdefault(json.dumps(list(row.messages), sort_keys=True), row)
    return list(found.values())


def conversation_of(row: TrajectoryRow, renderer: Renderer, prompt: Prompt) -> Conversation:
    """A stored episode as it is learnt from: as it was played, or behind the target's own `prompt`, if that had been
    followed by advice."""
    assert row.token_ids is not None, "chosen for having them"
    assert row.sampled_mask is not None
    ids, sampled = [int(i) for i in row.token_ids], [bool(s) for s in row.sampled_mask]
    if row.group_id == HINT:
        roles = [m["role"] for m in row.messages]
        first = [Message(m["role"], m["content"]) for m in row.messages[: roles.index("assistant")]]
        plain = renderer.start(prompt, first)
        shown = sampled.index(True)
        ids, sampled = [*plain.ids, *ids[shown:]], [*plain.sampled, *sampled[shown:]]
    return Conversation(ids, sampled, [0.0] * len(ids))


def learn(
    context: Context, name: str, successes: Sequence[TrajectoryRow], wanted: TrainingSettings, passes: int,
    environment_id: str | None = None, demonstrations: Sequence[Conversation] = (), of: Sequence[str] = (),
    least: int | None = None,
) -> Learnt:  # fmt: skip
    """An adapter that has learnt from `successes`, and from `demonstrations` `of` these families, in so many passes,
    and more where these come to fewer than `least` steps (None: `train.recall_steps`): it is steps that teach, and a
    few conversations make few. It is stored under `name`, which is unique in the round: the capability's, where an
    environment is given. It is made once; a process that follows one that died resumes it."""
    round_id, train = context.round.id, context.settings.train
    identity, output = adapter_id(round_id, name), context.folder / "training" / name
    settings = replace(
        wanted,
        steps=max(
            train.recall_steps if least is None else least,
            recall_steps(len(successes) + len(demonstrations), passes, wanted),
        ),
        learning_rate=train.recall_rate or wanted.learning_rate,
        temperature=1.0,  # likelihood as the model has it: nothing is sampled
        shuffled=False,
        hints=0.0,
        most_episodes=None,
    )
    families = sorted({*(row.family for row in successes), *of})
    figures = {
        "successes": len(successes),
        "demonstrations": len(demonstrations),
        "families": len(families),
        "passes": passes,
    }
    shape = {"rank": settings.rank, "alpha": settings.alpha, "upper_layers": settings.upper_layers}
    capability_id = row_id(round_id, name) if environment_id else None
    config = {**shape, **figures, "learning_rate": settings.learning_rate, "learnt": families}
    begin_adapter(context, identity, capability_id, environment_id, config)
    run = context.part_run(f"{round_id}-{name}", name, capability=name, kind="recall")
    RunLog(context.registry, run).params(figures)
    if (adapter := context.store.row(AdapterRow, id=identity)) is None or not adapter.path:
        sources = Counter(row.purpose for row in successes) + Counter({"demonstrations": len(demonstrations)})
        counts = ", ".join(f"{count} of {what}" for what, count in sources.most_common())
        logger.info("%s learns from %d conversations in %d families: %s", name, sources.total(), len(families), counts)
        weights, folder = _learnt_weights(context, name, successes, demonstrations, settings, run), output / "final"
        finish_adapter(context, identity, weights, folder)
        adapter = context.store.row(AdapterRow, id=identity)
        for left in {*output.iterdir()} - {folder}:  # no step of it is ever chosen but the last
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert adapter is not None
    return Learnt(adapter, settings.steps, run)


def _learnt_weights(
    context: Context, name: str, successes: Sequence[TrajectoryRow], demonstrations: Sequence[Conversation],
    settings: TrainingSettings, run: str,
) -> Path:  # fmt: skip
    """The folder of the last step's weights. Raises `Untrainable` where they have come apart."""
    renderer, prompt = context.base.renderer, first_opening(context.target)[0]
    output = context.folder / "training" / name
    conversations = [*(conversation_of(row, renderer, prompt) for row in successes), *demonstrations]
    with Meter(f"learn {name}", settings.steps, "steps", 0) as meter, Stopwatch() as learning:

        def on_step(record: StepRecord) -> None:
            context.still_ours()
            context.registry.log_steps(run, {record.step: {"nll": record.metrics["nll"]}})
            if context.budget is not None:  # no episode is charged on the way, and seconds are counted with charges
                context.budget.admit((), "training")
            meter.advance(f"{record.metrics['nll']:.3f} nats a token", say=True)

        actor = context.backend.actor(context.probe.ids, f"{name}@{context.round.id}")
        learnt = recall_adapter(conversations, actor, renderer, settings, output, on_step)
    context.model.seconds += learning.seconds
    try:  # no step's figures say what its own update has done
        check_finite(learnt.folder, name)
    except NotFinite as problem:
        raise come_apart(learnt.last) from problem
    return learnt.folder
