"""A lineup where the environment does not open a task: the base has it, and the others keep their own decisions."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from models.renderer import Renderer
from models.router.router import RouteDecision
from tasks.measuring import lineup
from tests.tasks.counting_target import Counting, target
from tests.tokenizers_trained import chatml_tokenizer


class Breaking(Counting):
    def reset(self, task: Any) -> Any:
        if task.id == "t2":
            raise KeyError("no such record")
        return super().reset(task)


def test_the_base_has_a_task_that_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lineup,
        "_play_one",
        lambda context, lineup, capability, episodes, *rest: [f"{capability}-{e.task.id}" for e in episodes],
    )
    stored: list[Any] = []

    def route(policy: Any, renderer: Any, given: Any) -> list[RouteDecision]:
        names = {"Count 1.": "one", "Count 2.": "two", "Count 3.": "three"}
        return [RouteDecision(names[one.text], {}, (), 0.0, "linear") for one in given]

    context: Any = SimpleNamespace(
        target=SimpleNamespace(tasks=target.tasks, environment=Breaking, name="counting"),
        base=SimpleNamespace(policy=None, renderer=Renderer(chatml_tokenizer())),
        model=nullcontext(),
        store=SimpleNamespace(put=lambda rows, replace: stored.extend(rows)),
        round=SimpleNamespace(id="r"),
    )
    router: Any = SimpleNamespace(route=route, version="v")
    members = lineup.Lineup({"one": "a1", "three": "a3"}, router)
    played = lineup.play_lineup(context, members, lineup.Trials(target.tasks("test")[1:4], 1, 0), "test")
    assert played.ids == ["one-t1", "-t2", "three-t3"]
    assert played.acted == {"t1": "one", "t2": "", "t3": "three"}
    assert [row.trajectory_id for row in stored] == ["one-t1", "three-t3"]
