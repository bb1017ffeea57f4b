"""A training whose machine is lost goes on in another home from the last checkpoint that was put into the storage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError
from models.adapters.files import adapter_digest
from models.training import grpo
from models.training.checkpoints import last_whole_checkpoint
from settings import load_settings
from tasks import train as stage_file
from tasks.measuring.lineup import stored_member
from tasks.round.context import Context
from tasks.round.preflight import check_without_loading
from tasks.round.results import TrainResult
from tasks.round.stage import forget
from tasks.synthesis.learning import training as training_file
from tests.storage_served import s3_served
from tests.tasks.test_train import CAPABILITY, Died, dying, opened, played, trained


def test_it_goes_on_from_the_last_checkpoint_of_a_home_that_is_gone(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = next(opened(settings_folder / "undisturbed", tiny_model, monkeypatch))
    whole = trained(undisturbed)
    episodes = len(played(undisturbed, "training"))
    forget(undisturbed.round.id)
    with s3_served() as s3:
        for files in (f"{s3}/trainings", (settings_folder / "share").as_uri()):
            place = settings_folder / files.partition(":")[0]
            place.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRACE_DATABASE", f"sqlite:///{place}/trace.db")
                patch.setenv("TRACE_FILES", files)
                goes_on(place, tiny_model, patch, whole, episodes)


def goes_on(place: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, whole: TrainResult, episodes: int) -> None:
    """Three homes after one another, each in a folder of its own: the first dies in its last step."""

    def in_home(name: str) -> Context:
        return next(opened(place / name, tiny_model, monkeypatch))

    first = in_home("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_file, "step_row", dying(training_file.step_row, 3))
        with pytest.raises(Died):
            trained(first)
    found = last_whole_checkpoint(stage_file.course_of(first, CAPABILITY).folder)
    assert found is not None
    assert found[0].name == "checkpoint-2"
    forget(first.round.id)
    shutil.rmtree(first.settings.folder)

    begun: list[str] = []
    real = grpo.make_steps

    def watched(owed: grpo.StepsOwed, *given: Any) -> None:
        begun.append(owed.resume.name if owed.resume else "anew")
        real(owed, *given)

    monkeypatch.setattr(grpo, "make_steps", watched)
    second = in_home("second")
    assert second.round.id == first.round.id
    result = trained(second)
    assert begun == ["checkpoint-2"]
    assert (result.sha256, result.choice, result.steps) == (whole.sha256, whole.choice, whole.steps)
    assert len(played(second, "training")) == episodes
    forget(second.round.id)
    shutil.rmtree(second.settings.folder)

    third = in_home("third")
    _, folder = stored_member(third, CAPABILITY, result.adapter)
    assert folder.is_relative_to(third.settings.folder)
    assert adapter_digest(folder) == whole.sha256
    assert trained(third).sha256 == whole.sha256
    assert begun == ["checkpoint-2"], "nothing was trained again"
    forget(third.round.id)


def test_a_storage_that_cannot_be_written_is_refused_before_the_round(settings_folder: Path) -> None:
    (settings_folder / "file").touch()
    address = (settings_folder / "file" / "in").as_uri()
    with pytest.raises(ConfigurationError, match=f"files = '{address}' cannot be used"):
        check_without_loading(load_settings(home=settings_folder / "home", files=address))
    with pytest.raises(ConfigurationError, match="a user, a password or options"):
        check_without_loading(load_settings(home=settings_folder / "home", files="s3://me:secret@bucket"))
