"""Checkpoints that the store knows nothing of: of a backup that was made amid a training, and of a database that was
made anew beside the home's files. What it has no step of is trained again, and is its own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from db import AdapterRow, TrainingStepRow
from models.training.checkpoints import COMPLETE, ENDED, forget_later, last_whole_checkpoint
from settings import load_settings
from tasks.housekeeping import backup as backup_file
from tasks.housekeeping.backup import make_backup
from tasks.housekeeping.restore import restore_backup
from tasks.round.adapters import adapter_id
from tasks.round.context import Context
from tasks.round.stage import forget
from tasks.synthesis.learning import training as training_file
from tests.tasks import test_train
from tests.tasks.test_train import CAPABILITY, Died, dying, played, trained


def opened(home: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A round whose training makes two steps, and whose last checkpoint is taken."""
    monkeypatch.setitem(test_train.TRAIN, "steps", 2)
    context = next(test_train.opened(home, model, monkeypatch))
    last = context.settings.train.model_copy(update={"candidates": 1})
    context.settings = context.settings.model_copy(update={"train": last})
    return context


def dies_at(context: Context, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_file, "step_row", dying(training_file.step_row, step))
        with pytest.raises(Died):
            trained(context)


def steps_of(context: Context) -> list[int]:
    identity = adapter_id(context.round.id, CAPABILITY)
    return sorted(row.step for row in context.store.rows(TrainingStepRow, adapter_id=identity))


def test_steps_that_a_backup_lacks_are_made_again(
    settings_folder: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is copied first, and the round goes on while the files are."""
    context = opened(settings_folder / "home", tiny_model, monkeypatch)
    dies_at(context, 1)
    real = backup_file.copy_sqlite

    def copied(source: Path, to: Path) -> None:
        real(source, to)
        if to.name == "trace.db":
            dies_at(context, 2)

    monkeypatch.setattr(backup_file, "copy_sqlite", copied)
    made = make_backup(context.settings, tmp_path / "b.zip", "x")
    assert any(f"checkpoint-1/{COMPLETE}" in name for name in made.members)
    forget(context.round.id)
    restore_backup(tmp_path / "b.zip", load_settings(home=tmp_path / "there", profile="smoke"))
    again = opened(tmp_path / "there", tiny_model, monkeypatch)
    assert again.round.id == context.round.id
    assert trained(again).steps == 2
    assert steps_of(again) == [1, 2]
    episodes = {row.id for row in played(again, "training")}
    assert [len(test_train.ids_of(again, step, []) & episodes) for step in range(2)] == [8, 8]
    forget(again.round.id)


def test_a_database_that_is_made_anew_does_not_take_the_trainings_of_the_one_before(
    settings_folder: Path,
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    home = settings_folder / "home"
    (settings_folder / "share").mkdir()
    monkeypatch.setenv("TRACE_FILES", (settings_folder / "share").as_uri())
    first = opened(home, tiny_model, monkeypatch)
    trained(first)
    forget(first.round.id)
    first.store.close()
    for file in home.glob("trace.db*"):
        file.unlink()
    monkeypatch.setitem(test_train.TRAIN, "rank", 8)
    with caplog.at_level(logging.WARNING, "trace"):
        second = opened(home, tiny_model, monkeypatch)
        result = trained(second)
    assert second.round.id == first.round.id
    row = second.store.row(AdapterRow, id=result.adapter)
    assert row is not None
    assert json.loads((home / row.path / "adapter_config.json").read_text())["r"] == row.config["rank"] == 8
    assert (steps_of(second), len(played(second, "training"))) == ([1, 2], 16)
    (aside,) = home.glob(f"{first.round.id}-before-*")
    assert (aside / "training" / CAPABILITY / "final").is_dir()
    assert any(f"they are kept as {aside.name}" in r.getMessage() for r in caplog.records)
    forget(second.round.id)


def test_a_round_that_goes_on_keeps_its_folder(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(settings_folder / "home", tiny_model, monkeypatch)
    (first.folder / "kept").touch()
    forget(first.round.id)
    again = opened(settings_folder / "home", tiny_model, monkeypatch)
    assert (again.folder / "kept").is_file()
    forget(again.round.id)


def test_what_is_later_than_the_store_is_forgotten_with_its_ending(tmp_path: Path) -> None:
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / COMPLETE).write_text("[]")
    (tmp_path / ENDED).write_text('{"ending": "mastered"}')
    forget_later(tmp_path, 3)
    assert (tmp_path / ENDED).is_file()
    forget_later(tmp_path, 2)
    found = last_whole_checkpoint(tmp_path)
    assert found is not None
    assert found[0].name == "checkpoint-2"
    assert not (tmp_path / ENDED).exists()
