"""A training that the GPU has no memory for ends once, by an error that says what to do, and holds nothing after it.
One whose checkpoint the disk has no room for says so, and of no other error is that said."""

from __future__ import annotations

import errno
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sqlalchemy.exc import OperationalError

from environments.contract import Action, Observation, TargetTask
from errors import PolicyError, ProviderError, StoreError, TraceError, TrainingError, TrainingMemoryError
from flows.improve import _ends
from models.out_of_memory import let_go, missing, out_of_memory_told
from models.training.actors import LocalActor, retired_after
from models.training.checkpoints import storing
from models.training.grpo import train_adapter
from models.training.records import StepRecord
from models.training.trl_trainer import EpisodeGRPO
from tasks.operations.jobs import raise_failure
from tasks.round.stage import is_transient
from tests.models.training.test_grpo import SMALL, Source, Toy, weights

# As torch 2.13 says it on an H100.
SAID = (
    "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 78.12 GiB memory in use. Of the allocated memory 76.10 GiB "
    "is allocated by PyTorch, and 1.31 GiB is reserved by PyTorch but unallocated."
)
HELD: list[Any] = []
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Block:
    """Stands for what is on the GPU: it is part of a circle, as much of a trainer is."""

    def __init__(self) -> None:
        self.itself = self


def runs_out(trainer: Any, *_: Any, **__: Any) -> torch.Tensor:
    """A backward pass that the GPU has no memory for."""
    block = Block()
    HELD[:] = [weakref.ref(block), weakref.ref(trainer)]
    raise torch.OutOfMemoryError(SAID)


def held() -> list[bool]:
    """Whether the failed pass's memory is still held, and whether the trainer's is."""
    return [reference() is not None for reference in HELD]


def test_it_is_an_error_that_says_what_to_do_and_is_not_tried_again(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, renderer = tiny_model
    before = weights(policy)
    monkeypatch.setattr(EpisodeGRPO, "_compute_loss", runs_out)
    with pytest.raises(TrainingMemoryError) as raised:
        train_adapter(Source(), LocalActor(policy), renderer, SMALL, tmp_path, lambda _: None)
    assert str(raised.value) == (
        "a training ran out of the GPU's memory (2.25 GiB more were asked for, of 79.19 GiB 1.06 GiB were free); lower "
        f"train.micro_batch (now {SMALL.micro_batch}) or set train.micro_batch_tokens, set devices.recompute = true, "
        "or, where the sampler shares the GPU (policy.backend = 'local'), lower rollout.rows"
    )
    assert held() == [False, False], "though somebody has the error in hand"
    after = weights(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert policy.adapters == ()

    def failed() -> None:
        raise raised.value

    assert not is_transient(None, None, SimpleNamespace(result=failed)), "Prefect does not try the stage again"
    assert _ends(raised.value, str(raised.value), ""), "and the next run does not go on into it"


def test_only_what_is_not_done_yet_is_advised() -> None:
    settings = replace(SMALL, micro_batch_tokens=4096, recompute=True)
    with (
        pytest.raises(TrainingMemoryError, match=r"\(CUDA is full\); lower train\.micro_batch_tokens \(now 4096\), "),
        out_of_memory_told(settings, 1),
    ):
        raise torch.OutOfMemoryError("CUDA is full\nof a kind that says no more")
    assert missing(torch.OutOfMemoryError("")) == "torch says no more"


def test_one_of_several_processes_says_it_and_dies_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The others wait for it in a pass: one that went on would wait for them, and the job for ever."""
    with pytest.raises(torch.OutOfMemoryError), out_of_memory_told(SMALL, 2):
        raise torch.OutOfMemoryError(SAID)
    with pytest.raises(TrainingMemoryError, match=r"ran out of the GPU's memory \(2\.25 GiB more") as raised:
        raise_failure((1, capsys.readouterr().out + "what the launcher says\n"), "the process")
    assert not raised.value.transient


def test_memory_is_free_before_the_sampler_is_given_back_and_the_first_problem_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[list[bool]] = []

    def retire() -> None:
        seen.append(held())
        raise ProviderError("no server answers", transient=True)

    actor: Any = SimpleNamespace(retire=retire)
    with pytest.raises(TrainingMemoryError, match="ran out"), retired_after(actor), out_of_memory_told(SMALL, 1):
        runs_out(Block())
    assert seen == [[False, False]]
    assert "could not be given back: no server answers" in caplog.text
    with pytest.raises(ProviderError), retired_after(actor):
        pass


def test_a_problem_lets_go_of_what_it_came_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by way of the problems that it followed from, and of the GPU's cache."""
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(held() == [False, False]))

    def first() -> None:
        runs_out(Block())

    def second() -> None:
        try:
            first()
        except torch.OutOfMemoryError:
            raise ValueError("on the way")  # noqa: B904

    try:
        second()
    except ValueError as problem:
        assert held() == [True, True]
        let_go(problem)
    assert emptied == [True]


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
