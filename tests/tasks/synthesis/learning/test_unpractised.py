"""A generalist of whose practice nothing is kept, in a round: its weights are those that it practised from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from db import GENERALIST, AdapterRow
from errors import Untrainable
from tasks.measuring.lineup import tried_on_diagnosis
from tasks.methods.seed.seed_run import close_round
from tasks.round.adapters import before_practice, own_adapter
from tasks.synthesis.learning import training
from tests.tasks.methods.letters_target import SIZE, solved
from tests.tasks.methods.seeds_made import TRAIN, seed_run, without_prefect


def test_the_router_learns_what_it_solves_and_its_row_says_how_it_was_made(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **more: Any) -> Any:
        raise Untrainable("the weights have come apart")

    without_prefect(monkeypatch)
    monkeypatch.setattr(training, "train_adapter", broken)
    train = TRAIN | {"demonstrations": 4, "practice": 2, "carry_rate": 0.003, "recall_rate": 0.01}
    run = seed_run(settings_folder, tiny_model, target=solved.name, budget=500, train=train)
    context = run.context
    run.play_round(context, "contrast")
    before = before_practice(context.store, context.round.id)
    own = context.store.row(AdapterRow, id=own_adapter(context.stored, GENERALIST))
    assert before is not None
    assert own is not None
    assert own.sha256 == before.sha256
    assert len(tried_on_diagnosis(context, GENERALIST)) == SIZE, "it has played them before, as another adapter"
    # The rate of its practice is not its own, and it has not begun from an adapter.
    assert own.config == before.config
    assert own.config["learning_rate"] == 0.01
    close_round(context)
