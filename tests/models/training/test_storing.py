"""A checkpoint that cannot be written is told as such, and nothing else is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from environments.contract import Action, Observation, TargetTask
from errors import PolicyError, StoreError, TraceError, TrainingError
from models.training.actors import LocalActor
from models.training.checkpoints import storing
from models.training.grpo import train_adapter
from models.training.records import StepRecord
from tests.models.training.test_grpo import SMALL, Source, Toy

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Full(Toy):
    """The disk of its world is full in one scenario of three, and the others have equal rewards."""

    uniform = True

    def reset(self, task: TargetTask) -> Observation:
        self.place = task.seed
        return super().reset(task)

    def step(self, action: Action) -> Observation:
        if self.place % 3 == 0:
            raise FULL
        return super().step(action)


def test_a_full_disk_is_told_whichever_library_wrote_and_the_projects_own_errors_pass(tmp_path: Path) -> None:
    for problem in (FULL, RuntimeError("[enforce fail] PytorchStreamWriter failed writing file")):
        with pytest.raises(StoreError, match=r"a checkpoint in .* could not be written"), storing(tmp_path):
            raise problem
    own = PolicyError("the server says: I/O error")
    with pytest.raises(TraceError) as raised, storing(tmp_path):
        raise own
    assert raised.value is own


@pytest.mark.parametrize("problem", [OperationalError("INSERT", {}, Exception("disk I/O error")), FULL])
def test_what_the_store_says_of_a_step_is_no_checkpoints(tiny_model: Any, tmp_path: Path, problem: Exception) -> None:
    policy, renderer = tiny_model

    def on_step(record: StepRecord) -> None:
        raise problem

    with pytest.raises(type(problem)) as raised:
        train_adapter(Source(), LocalActor(policy), renderer, SMALL, tmp_path, on_step)
    assert raised.value is problem


def test_what_an_environment_says_is_no_checkpoints(tiny_model: Any, tmp_path: Path) -> None:
    """Nothing to learn quotes the environment's error: the disk is not the training's."""
    policy, renderer = tiny_model
    with pytest.raises(TrainingError, match=r"4 groups had equal rewards; the others lost .* No space left") as raised:
        train_adapter(Source(Full), LocalActor(policy), renderer, SMALL, tmp_path, lambda _: None)
    assert not isinstance(raised.value, StoreError)
