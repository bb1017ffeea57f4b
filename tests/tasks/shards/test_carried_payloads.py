"""What JSON does not carry is not played by others, who would play something else."""

from __future__ import annotations

import datetime
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import TargetTask
from models.episodes import Episode
from tasks.shards.sharing import FEWEST, SharedPlay
from tasks.shards.work import is_carried


@pytest.mark.parametrize("payload", [{"a": [1, 2.5, None, True, "ä"]}, {}, {"b": {"c": []}, "a": 1}])
def test_json_is_carried(payload: Any) -> None:
    assert is_carried(payload)


@pytest.mark.parametrize(
    "payload", [{1: 10}, {"a": (1, 2)}, {"today": datetime.date(2026, 1, 1)}, {"a": {1}}, {"a": float("nan")}]
)
def test_what_comes_back_as_something_else_is_played_alone(payload: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A date ended the round, and prices by number were looked for by text: all episodes were lost."""
    assert not is_carried(payload)
    context: Any = SimpleNamespace(
        store=SimpleNamespace(shards=lambda round_id: None),
        round=SimpleNamespace(id="r"),
        settings=SimpleNamespace(runner="process"),
        keep=lambda name, make: object(),
    )
    engine: Any = SimpleNamespace(renderer=object())
    ground: Any = SimpleNamespace(of_target=True, where="shop")
    episodes = [Episode(f"e{n}", TargetTask(f"t{n}", "test", "f", n, {}), 1, 0) for n in range(FEWEST)]
    shared = SharedPlay(context)
    assert shared._digest(engine, ground, episodes) == ""
    episodes[-1] = Episode("e", TargetTask("odd", "test", "f", 99, payload), 1, 0)
    with caplog.at_level(logging.WARNING):
        assert shared.play(engine, ground, episodes, "it") is None
    assert caplog.text == "", "one process has nothing to tell"
    context.settings.runner = "dask"
    assert shared.play(engine, ground, episodes, "it") is shared.play(engine, ground, episodes, "it") is None
    assert caplog.text.count("task odd has a payload that is no JSON: this process plays it and its like alone") == 1
