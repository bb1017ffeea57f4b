"""What JSON does not carry is not played by others, who would play something else."""

from __future__ import annotations

import datetime
import json
import logging
from collections import Counter, OrderedDict, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import TargetTask
from models.episodes import Episode
from models.policy import PolicyIdentity
from tasks.shards.sharing import FEWEST, SharedPlay
from tasks.shards.work import Work, is_carried


@pytest.mark.parametrize("payload", [{"a": [1, 2.5, None, True, "ä"]}, {}, {"b": {"c": []}, "a": 1}])
def test_json_is_carried(payload: Any) -> None:
    assert is_carried(payload)


@pytest.mark.parametrize(
    "payload",
    [
        {1: 10},
        {"a": (1, 2)},
        {"today": datetime.date(2026, 1, 1)},
        {"a": {1}},
        {"a": float("nan")},
        defaultdict(list),
        {"stock": [Counter(apple=3)]},
    ],
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


@pytest.mark.parametrize(
    "payload", [{"b": [1, "ä"], "a": 1}, OrderedDict(b=1, a=2), defaultdict(list, a=[1]), Counter(a=3)]
)
@pytest.mark.parametrize(
    "tags", [("pay", "log_in"), ["pay", "log_in"], {"pay", "log_in"}, frozenset({"pay", "log_in"})]
)
def test_work_comes_back_from_json_whatever_the_checks_of_tasks_let_pass(payload: Any, tags: Any) -> None:
    """Capabilities as a set, and some kinds of dict, ended the round at the first play that was shared."""
    tasks = [TargetTask(f"t{n}", "test", "f", n, payload, tags) for n in range(2)]
    episodes = tuple(Episode(task.id, task, 1, 2, "a") for task in tasks)
    work = Work(episodes, "diagnosis", 0.5, 32, "shop", PolicyIdentity("base", "1"), ("a", "digest"), "row")
    back = Work.from_json(json.loads(json.dumps(work.as_json())))
    task = back.episodes[1].task
    assert list(task.payload.items()) == list(payload.items())
    assert task.capabilities == (("pay", "log_in") if isinstance(tags, tuple | list) else ("log_in", "pay"))
    plain = [replace(e, task=replace(e.task, payload={}, capabilities=())) for e in (*episodes, *back.episodes)]
    assert plain[:2] == plain[2:]
    assert replace(back, episodes=()) == replace(work, episodes=())
