"""A finite target with too few validation tasks is told of before a round trains what it could not prove."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from db import LookRow, Store, open_store
from environments.contract import TargetTask
from settings import Settings, load_settings
from tasks.operations.provable import own_tasks, unprovable
from tests.tasks.counting_target import CountingTarget
from tests.tasks.targets.drawing_target import DrawingTarget


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    """A target is called by a path, whatever its own name is."""
    return load_settings(target="tests.tasks.counting_target:target")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite+pysqlite:///{tmp_path / 'trace.db'}") as opened:
        yield opened


class Finite(CountingTarget):
    """Ten validation tasks: seven that need one capability, three of which need another as well."""

    def tasks(self, split: str) -> Sequence[TargetTask]:
        families = ["both"] * 3 + ["one"] * 4 + ["none"] * 3
        return [TargetTask(f"{split}-{n}", split, family, n, {"n": n}) for n, family in enumerate(families)]

    def families(self) -> Mapping[str, Sequence[str]]:
        return {"both": ("count", "say"), "one": ("count",), "none": (), "elsewhere": ("wait",)}

    def generate(self, family: str, seed: int) -> TargetTask:
        raise NotImplementedError


class Drawing(Finite, DrawingTarget):
    """It has as few, and draws more."""


def test_capabilities_with_too_few_tasks_of_their_own_are_named(store: Store, settings: Settings) -> None:
    assert own_tasks(Finite()) == {"count": 7, "say": 3, "wait": 0}
    said = unprovable(store, Finite(), settings)
    assert "an adapter needs 7 validation tasks of its own capability's families at look 1" in said
    assert "fewer have say (3), wait (0): nothing" in said
    look = LookRow(
        id="first", round_id=store.start_round(settings.target, "counting-1", 0, "laptop", {}).id, number=1, alpha=0.03,
        target=settings.target, data_hash="counting-1", split="validation", draw=0,
    )  # fmt: skip
    store.put([look])
    assert "an adapter needs 9 validation tasks" in unprovable(store, Finite(), settings)
    assert "fewer have count (7), say (3), wait (0)" in unprovable(store, Finite(), settings)


def test_a_round_that_plays_a_part_of_them_proves_by_that_part(store: Store, settings: Settings) -> None:
    part = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"tasks": 5})})
    assert own_tasks(Finite(), 5) == {"count": 3, "say": 1, "wait": 0}
    said = unprovable(store, Finite(), part)
    assert "fewer have count (3), say (1), wait (0)" in said
    assert "more validation tasks, raise rollout.tasks = 5, or let the target draw" in said


def test_nothing_is_said_where_more_are_drawn_or_families_are_not_known(store: Store, settings: Settings) -> None:
    assert unprovable(store, Drawing(), settings) == unprovable(store, CountingTarget(), settings) == ""
