"""A target whose tasks are divided otherwise than before is refused before a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from db import open_store
from environments.contract import TargetTask
from errors import TargetError
from models.scripted import NoopPolicy
from tasks.round.engine import Engine, Origin, Playground
from tasks.round.rollouts import episodes_for
from tasks.targets.moved import refuse_moved
from tests.tasks.counting_target import Counting

NAMES = [f"t{n}" for n in range(6)]
SPLITS = ("diagnosis", "validation", "test")


def divided(names: list[str]) -> dict[str, list[TargetTask]]:
    """A third of the names for each split, in their order."""
    return {s: [TargetTask(n, s, "f", 0, {"n": 1}) for n in names[2 * i : 2 * i + 2]] for i, s in enumerate(SPLITS)}


def test_tasks_that_have_moved_to_another_split_are_refused(tmp_path: Path) -> None:
    with open_store(f"sqlite+pysqlite:///{tmp_path / 'trace.db'}") as store:
        refuse_moved(store, "mine", "one", divided(NAMES))
        at = store.start_round("mine", "one", 0, "smoke", {})
        engine = Engine(store, Origin("mine", "one", at.id), NoopPolicy())
        engine.play(Playground(Counting, "mine", "diagnosis", 0.0, 8), episodes_for(divided(NAMES)["diagnosis"], 1, 0))
        store.start_round("mine", "one", 1, "smoke", {})  # which has played nothing
        refuse_moved(store, "mine", "one", divided([*NAMES, "t9"]))
        refuse_moved(store, "mine", "two", divided(NAMES[::-1]))
        refuse_moved(store, "other", "one", divided(NAMES[::-1]))
        with pytest.raises(TargetError, match=r"'t0' of mine was of diagnosis in round 1 and is of test now \(2 tasks"):
            refuse_moved(store, "mine", "one", divided(NAMES[::-1]))
