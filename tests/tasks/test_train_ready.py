"""What calibration has played is not played again: its informative groups are those of a training's first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from db import TrainingStepRow, row_id
from environments.contract import TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from tasks import train as stage_file
from tasks.episodes.groups import training_groups
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.synthesis.calibration import calibration_tasks, measure
from tasks.synthesis.learning.played_before import groups_before
from tests.models.training.test_grpo import Toy
from tests.tasks.test_train import CAPABILITY, World, opened, played

SAMPLES = 4


class Worlds:
    """A target that can be composed from; its words are scored by their letters."""

    name, data_hash = "worlds", "h"

    def families(self) -> dict[str, tuple[str, ...]]:
        return {"own": (CAPABILITY,), "other": ()}

    def generate(self, family: str, seed: int) -> TargetTask:
        return TargetTask(f"{family}-{seed}", "generated", family, seed)

    def environment(self) -> World:
        return World()


def composed(share: float) -> ComposedEnvironment:
    target: Any = Worlds()
    spec = CompositionSpec("worlds", "h", CAPABILITY, ("own",), ("other",) if share else (), share)
    return ComposedEnvironment(target, spec)


@pytest.fixture(params=[0.0, 0.5])
def context(
    request: pytest.FixtureRequest, settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Context]:
    """A round that has calibrated its capability, without retention scenarios and with half of them."""
    environment = composed(request.param)
    for context in opened(settings_folder / "home", tiny_model, monkeypatch):
        changed = {"seeds": 6, "samples": SAMPLES, "retention_share": request.param}
        calibration = context.settings.calibration.model_copy(update=changed)
        context.settings = context.settings.model_copy(update={"calibration": calibration})
        monkeypatch.setattr(stage_file, "stored_environment", lambda *given: environment)
        found = measure(context.engine, context.settings, environment)
        context.store.put([found.row("made")])
        yield context


def test_a_scenario_that_does_not_open_any_more_ends_no_training(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calibration loses its episodes, or had none to lose; the stage died with whatever the environment raised."""
    environment: Any = stage_file.stored_environment(
        context.store, context.round, context.target, CAPABILITY, context.keep
    )
    gone = groups_before(context, CAPABILITY, environment, None).learn[0][0].episode.task
    reset = World.reset

    def failing(self: World, task: TargetTask) -> Any:
        if task.id == gone.id:
            raise KeyError("no such customer")
        return reset(self, task)

    monkeypatch.setattr(World, "reset", failing)
    before = groups_before(context, CAPABILITY, environment, None)
    assert before.learn
    assert gone.id not in {t.episode.task.id for g in (*before.learn, *before.rest) for t in g}
    assert f"{gone.id} did not open again" in caplog.text


def test_a_training_begins_with_what_calibration_played(context: Context) -> None:
    environment = stage_file.stored_environment(context.store, context.round, context.target, CAPABILITY, context.keep)
    before, share = groups_before(context, CAPABILITY, environment, None), environment.spec.retention_share
    groups = before.learn
    calibrated = {row.id: row for row in played(context, "calibration")}
    tasks = calibration_tasks(environment, 6, 1)  # type: ignore[arg-type]
    informative = [
        t for t in tasks if len({round(r.reward or 0, 6) for r in calibrated.values() if r.task_id == t.id}) > 1
    ]
    assert len(informative) >= 2, "a random model earns this and that"
    most = 2 if share == 0 else 1
    assert [g[0].episode.task for g in groups] == informative[:most], "room is left for retention scenarios"
    assert [len(g) for g in groups] == [SAMPLES] * most
    for one in (t for g in groups for t in g):
        row = next(iter(context.store.trajectories(None, with_blobs=True, id=one.episode.key)))
        assert row.token_ids is not None
        assert row.logprobs is not None
        assert list(row.token_ids) == one.conversation.ids
        assert one.score is not None
        assert one.score.reward == row.reward
        assert list(row.logprobs) == pytest.approx(one.conversation.logprobs)
        assert 0 < one.conversation.shared < one.conversation.sampled.index(True)

    result = stage_file.train.do(context, CAPABILITY)
    assert result.steps == 3
    assert len(played(context, "calibration")) == len(calibrated)
    adapter = adapter_id(context.round.id, CAPABILITY)
    first, *others = sorted(context.store.rows(TrainingStepRow, adapter_id=adapter), key=lambda r: r.step)
    collections = (0, SAMPLES, 2 * SAMPLES)
    assert first.metrics["played"] in (collections[:1] if share == 0 else collections[1:])
    counted = [t.score for group in (*before.learn, *before.rest) for t in group]
    assert len(counted) == len(calibrated), "those that teach nothing are in the figures, too"
    assert first.metrics["own_episodes"] >= len(calibrated)
    if first.metrics["own_episodes"] == len(calibrated):
        assert first.success == pytest.approx(sum(s.success for s in counted if s) / len(counted))
    assert first.metrics["grad_norm"] > 0, "they were learnt from"
    assert first.logprob_gap == pytest.approx(0.0, abs=1e-4), "the weights that are trained have played them"
    assert all(step.metrics["played"] > first.metrics["played"] for step in others)
    shown = training_groups(context.store, context.round.id, adapter, str).groups
    assert {g.step for g in shown} == ({2, 3} if share == 0 else {1, 2, 3}), "a first step that played nothing has none"


@pytest.mark.parametrize("reason", ["weights", "size", "advice", "uncalibrated", "opening"])
def test_what_would_not_be_the_same_is_played_anew(
    context: Context, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    environment = stage_file.stored_environment(context.store, context.round, context.target, CAPABILITY, context.keep)
    assert groups_before(context, CAPABILITY, environment, None).learn
    adapter = None
    if reason == "weights":
        adapter = "another"
    if reason == "size":
        train = context.settings.train.model_copy(update={"group_size": SAMPLES - 1})
        context.settings = context.settings.model_copy(update={"train": train})
    if reason == "advice":
        found = measure(context.engine, context.settings, environment).row("made")  # type: ignore[arg-type]
        found.detail["hinted"] = 0.5  # type: ignore[index]
        context.store.put([found], replace=True)
    if reason == "uncalibrated":
        monkeypatch.setattr("tasks.synthesis.learning.played_before.row_id", lambda *given: row_id("nothing"))
    if reason == "opening":
        monkeypatch.setattr(World, "instructions", "Answer in other words.")
    found = groups_before(context, CAPABILITY, environment, adapter)
    assert not found.learn
    assert not found.rest


def test_a_first_step_learns_from_each_family_as_much_as_calibration_found_in_it(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `train.focus` calibration lists its scenarios family by family: the first of them are all of one."""
    families, target = ("first", "second"), Worlds()
    spec = CompositionSpec("worlds", "h", CAPABILITY, families, (), 0.0)
    environment = ComposedEnvironment(target, spec)  # type: ignore[arg-type]
    monkeypatch.setattr(World, "score", Toy.score)
    for context in opened(settings_folder / "home", tiny_model, monkeypatch):
        calibration = context.settings.calibration.model_copy(update={"seeds": 8, "samples": SAMPLES})
        context.settings = context.settings.model_copy(update={"calibration": calibration})
        found = measure(context.engine, context.settings, environment, known=dict.fromkeys(families, 0.5))
        context.store.put([found.row("made")])
        before = groups_before(context, CAPABILITY, environment, None)
        whole = [group[0].episode.task.family for group in (*before.learn, *before.rest)]
        assert Counter(whole) == {"first": 4, "second": 4}
        assert found.figures["informative"] == 1.0
        assert [group[0].episode.task.family for group in before.learn] == ["first", "second"]
