"""What training draws from under limits is what it was, levels included; a step's episodes count once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import open_store
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.written import WrittenEnvironment, WrittenSpec
from environments.targets.shop import target
from errors import LimitReached
from models.training.records import Dialled, levels_of
from settings import load_settings
from tasks.synthesis.limited import limited
from tasks.unattended.limits import RoundLimits
from tests.db.store_examples import trajectory

MODULE = Path(__file__).parents[2] / "integration" / "targets" / "module_move_order.py"


def held(most: int) -> Any:
    """Limits that allow steps of up to `most` episodes."""

    def check(episodes: int) -> None:
        if episodes > most:
            raise LimitReached("enough")

    return SimpleNamespace(check=check, trained=lambda adapter, seed: 0)


@pytest.fixture
def composed() -> ComposedEnvironment:
    return ComposedEnvironment(target(), CompositionSpec("shop", target().data_hash, "x", ("move_pending",)))


def test_a_source_without_levels_has_none_under_limits(composed: ComposedEnvironment) -> None:
    source = limited(composed, held(8), "a")
    assert levels_of(source) == (0, 1)
    assert source.scenario(3) == composed.scenario(3)
    assert source.own(source.scenario(3))
    assert source.advice(source.scenario(3)) == composed.advice(composed.scenario(3))
    source.allow(8, 0)
    with pytest.raises(LimitReached):
        source.allow(9, 0)


def test_a_step_that_is_begun_again_counts_what_it_has_played_once(
    composed: ComposedEnvironment, settings_folder: Path
) -> None:
    with open_store(f"sqlite:///{settings_folder}/trace.db") as store:
        opened = store.start_round("shop", "data", 0, "smoke", {})
        limits = RoundLimits(load_settings(limits={"rollouts": 16}).limits, store, opened, settings_folder)
        source = limited(composed, limits, "a")
        about = {"purpose": "training", "adapter_id": "a"}
        store.add_trajectories([trajectory(opened.id, f"first-{i}", seed=0, **about) for i in range(8)])
        source.allow(8, 1)
        store.add_trajectories([trajectory(opened.id, f"second-{i}", seed=1, **about) for i in range(5)])
        source.allow(8, 1)  # its process died, three are owed
        for other, seed in (("a", 2), ("b", 1)):  # another step, another training
            with pytest.raises(LimitReached, match="13 episodes are played and 8 are next"):
                limited(composed, limits, other).allow(8, seed)
        with pytest.raises(LimitReached, match="13 episodes are played and 4 are next"):
            source.allow(9, 1)


@pytest.fixture
def written() -> Iterator[WrittenEnvironment]:
    module = SandboxedModule(MODULE.read_text())
    yield WrittenEnvironment(target(), WrittenSpec("shop", "h", module.capability, module.code_hash, ()), module)
    module.close()


def test_levels_are_turned_through_the_limits(written: WrittenEnvironment) -> None:
    source = limited(written, held(8), "a")
    assert isinstance(source, Dialled)
    assert levels_of(source) == (written.level, written.levels) == (0, 2)
    harder = source.at(1)
    assert levels_of(harder) == (1, 2)
    assert harder.scenario(5) == written.at(1).scenario(5) != written.scenario(5)
    with pytest.raises(LimitReached):
        harder.allow(9, 0)
