"""How much of the diagnosis a new adapter plays for the router."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from settings_parts import EvaluationSettings
from tasks.measuring import lineup

TASKS = [f"task-{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("routing", "paid", "played"),
    [
        (0, None, 12),  # all of it
        (4, None, 4),
        (4, 0, 4),  # what was set aside
        (4, 15, 7),  # what would be left over is theirs, evenly
        (4, 1000, 12),
        (0, 2, 12),
    ],
)
def test_an_adapter_plays_what_is_set_and_what_would_be_left_over(
    monkeypatch: pytest.MonkeyPatch, routing: int, paid: int | None, played: int
) -> None:
    asked: list[Sequence[str]] = []

    def for_routing(adapters: Sequence[str], purpose: str) -> int:
        asked.append((*adapters, purpose))
        return paid or 0

    context: Any = SimpleNamespace(
        tasks=lambda split: TASKS,
        settings=SimpleNamespace(evaluation=EvaluationSettings(routing=routing)),
        stored=None,
        seed=1,
        budget=None if paid is None else SimpleNamespace(for_routing=for_routing),
    )
    monkeypatch.setattr(lineup, "own_adapter", lambda stored, capability: f"{capability}-adapter")
    monkeypatch.setattr(lineup, "play_alone", lambda context, c, adapter, owed, what: list(owed.tasks))
    found = lineup.try_on_diagnosis(context, ["a", "b"])
    assert {c: len(tasks) for c, tasks in found.items()} == {"a": played, "b": played}
    assert found["a"] == found["b"], "they are compared on the same tasks"
    assert asked == ([] if paid is None else [("a-adapter", "b-adapter", lineup.TRIED)])
    assert lineup.try_on_diagnosis(context, []) == {}
