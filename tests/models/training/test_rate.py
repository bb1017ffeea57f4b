"""A rate that falls reaches its end with the steps or with the episodes, whichever are used up first; and how rows come
in micro-batches changes no figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.adapters.files import adapter_digest
from models.training import trl_trainer
from models.training.actors import LocalActor
from models.training.grpo import TrainingResult, train_adapter
from models.training.ranks import DealtRollouts
from tests.models.training.test_grpo import SMALL, Mixed, Source

FALLING = replace(SMALL, schedule="linear", collections=1)  # eight episodes a step


def rates(folder: Path) -> list[float]:
    """With which share of its peak each step was made."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    told = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["learning_rate"] / SMALL.learning_rate for entry in told if "loss" in entry]


def test_a_rate_falls_to_the_end_of_what_is_used_up_first(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model

    def train(folder: str, steps: int, most: int | None, until: int | None = None) -> TrainingResult:
        given = replace(FALLING, steps=steps, most_episodes=most)
        return train_adapter(
            Source(), LocalActor(policy), renderer, given, tmp_path / folder, lambda _: None, until=until
        )

    thirds = pytest.approx([1, 2 / 3, 1 / 3])
    whole = train("whole", 100, 24)
    assert (whole.ending, rates(tmp_path / "whole")) == ("budget", thirds), "three steps of a hundred use them up"
    train("cut", 100, 24, until=1)
    again = train("cut", 100, 24)
    assert rates(tmp_path / "cut") == thirds
    assert adapter_digest(again.folder) == adapter_digest(whole.folder), "gone on with it comes to the same weights"
    for most in (None, 1000):
        train(f"steps-{most}", 3, most)
        assert rates(tmp_path / f"steps-{most}") == thirds, "the steps are used up first"


def test_every_process_knows_how_many_episodes_were_played() -> None:
    """Each has an optimizer of its own, whose rate falls with them."""
    words: list[Any] = []
    leads = SimpleNamespace(index=0, count=1, tell=words.append)
    follows = SimpleNamespace(index=0, count=1, hear=lambda: words[0])
    row = torch.ones(1)
    rows = {"completion_ids": [[1]], "logprobs": [[0.0]]}
    source = SimpleNamespace(
        rollout=lambda prompts, trainer: rows,
        advantages_R=row,
        hinted_R=row.bool(),
        shared=0,
        worst_ratio=1.0,
        played=8,
    )
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")))
    for here, given in ((leads, source), (follows, None)):
        dealt = DealtRollouts(here, given, None)  # type: ignore[arg-type]
        dealt.rollout(["slot"], trainer)
        assert dealt.played == 8


def test_the_distance_to_the_base_does_not_depend_on_how_rows_come_in_micro_batches(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tokens, the longest rows come first; and no pass has more of them than is allowed, that through the base
    neither."""
    policy, renderer = tiny_model
    found, passes, score = [], list[tuple[bool, list[int]]](), trl_trainer.token_logprobs

    def scoring(model: Any, ids: Any, shared: int, *given: Any) -> Any:
        passes.append((torch.is_grad_enabled(), [len(row) - shared for row in ids]))
        return score(model, ids, shared, *given)

    monkeypatch.setattr(trl_trainer, "token_logprobs", scoring)
    for place, batches in enumerate(({"micro_batch": 12}, {"micro_batch_tokens": 30}, {"micro_batch_tokens": 1})):
        settings = replace(SMALL, groups=3, learning_rate=0.01, micro_batch_tokens=None)
        given = replace(settings, **batches)  # type: ignore[arg-type]
        made = train_adapter(Source(Mixed), LocalActor(policy), renderer, given, tmp_path / f"{place}", lambda _: None)
        found.append(made.records[1].kl)
        most = given.micro_batch_tokens or sum(max((rows for _, rows in passes), key=sum))
        assert all(sum(rows) <= max(most, *rows, 0) for _, rows in passes)
        of_base = [len(rows) for learning, rows in passes if not learning]
        assert sum(of_base) == 2 * trl_trainer.KL_ROWS, "two steps"
        passes.clear()
    assert found[0] > 1e-4
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-2)
