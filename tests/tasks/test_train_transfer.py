"""The stage that trains tries its adapter on the target early, and goes on from there as if it had not stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import TrainingStepRow
from environments.contract import TargetTask
from models.adapters.files import adapter_digest
from tasks.measuring.lineup import TRIED
from tasks.round.context import Context
from tasks.round.results import TransferFigures
from tasks.round.stage import forget
from tasks.synthesis.choosing import loaded
from tasks.synthesis.learning import course as course_file
from tasks.synthesis.learning import training as training_file
from tasks.synthesis.transfer import target_episodes
from tests.tasks.test_train import CAPABILITY, Died, World, dying, opened, played, trained

TASKS = [TargetTask(f"failed-{i}", "diagnosis", "own", i) for i in range(4)]


def checked(home: Path, model: Any, patch: pytest.MonkeyPatch, verdict: str = "") -> Iterator[Context]:
    """A round whose capability lacks in four tasks, and in which the check comes to `verdict`."""
    for context in opened(home, model, patch):
        context.__dict__["target"] = SimpleNamespace(environment=World, tasks=lambda split: TASKS)
        patch.setattr(course_file, "failed_tasks", lambda stored, name, tasks: list(tasks))
        real = course_file.__dict__["transfer_of"]

        def found(*given: Any, real: Any = real) -> TransferFigures:
            return real(*given).model_copy(update={"verdict": verdict})

        patch.setattr(course_file, "transfer_of", found)
        yield context


def test_nothing_that_carries_over_ends_the_training(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "does-not-transfer: as given"
    context = next(checked(settings_folder / "home", tiny_model, monkeypatch, why))
    result = trained(context)
    assert (result.steps, result.ending, result.verdict, result.chosen) == (1, "does-not-transfer", why, 1)
    assert result.goes_back
    found = result.transfer
    assert found is not None
    assert (found.step, found.episodes, found.tasks) == (1, 24, 4)
    logged = context.registry.steps[1]  # type: ignore[attr-defined]
    assert logged["transfer/environment_after"] == found.after
    assert logged["transfer/target_success"] == found.successes / 24
    rows = played(context, "transfer")
    assert {r.id for r in rows} == set(found.tried)
    assert {r.task_id for r in rows} == {task.id for task in TASKS}
    assert {r.adapter_id for r in rows} == {result.adapter}
    weights = context.folder / "training" / CAPABILITY / "weights" / "step-1"
    assert result.sha256 == adapter_digest(weights)
    # It is the adapter: what the router asks it to play on the same tasks is not taken for played.
    with loaded(context, weights, CAPABILITY) as name:
        context.engine.play(context.ground(TRIED), target_episodes(TASKS, 24, context.seed, name), "try")
    assert len(played(context, TRIED)) == len(played(context, "transfer")) == 24
    # The same once more: nothing is played, nothing is trained.
    before = {r.id for r in context.store.trajectories(context.round.id)}
    again = trained(context)
    assert again.model_copy(update={"choosing_seconds": 0}) == result.model_copy(update={"choosing_seconds": 0})
    assert {r.id for r in context.store.trajectories(context.round.id)} == before
    assert context.policy.adapters == ()
    forget(context.round.id)


def test_a_training_that_was_looked_at_is_the_one_that_was_not(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a process died in the check, and one after it."""
    with pytest.MonkeyPatch.context() as patch:
        other = next(opened(settings_folder / "plain", tiny_model, patch))
        plain = trained(other)
        assert plain.transfer is None
        forget(other.round.id)
    context = next(checked(settings_folder / "home", tiny_model, monkeypatch))
    for file, name, last, steps in ((course_file, "target_episodes", 1, 1), (training_file, "step_row", 2, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, name, dying(getattr(file, name), last))
            with pytest.raises(Died):
                trained(context)
        assert len(context.store.rows(TrainingStepRow)) == steps
    looked = trained(context)
    assert (looked.sha256, looked.steps, looked.ending) == (plain.sha256, plain.steps, plain.ending)
    assert looked.choice == plain.choice
    assert looked.transfer is not None
    assert len(played(context, "transfer")) == 24
    assert len(played(context, "training")) == len(played(other, "training"))
    forget(context.round.id)


def test_where_methods_compete_and_where_it_is_off_nothing_is_tried(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = next(checked(settings_folder / "home", tiny_model, monkeypatch))
    course = course_file.Course(CAPABILITY, None, "a", settings_folder, capability_id="c")  # type: ignore[arg-type]
    tasks = course_file.tasks_to_try
    assert tasks(context, course) == TASKS
    assert tasks(context, course_file.replace(course, capability_id=None)) == []
    context.budget = SimpleNamespace()  # type: ignore[assignment]
    assert tasks(context, course) == []
    context.budget = None
    off = context.settings.train.model_copy(update={"transfer": 0})
    context.settings = context.settings.model_copy(update={"train": off})
    assert tasks(context, course) == []
    forget(context.round.id)
