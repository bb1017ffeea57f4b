"""Sampled episodes as traces: turns and calls in order, reward and checks, bounded, without secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db import StepRow, Store, open_store
from models.adapters.registry import Registry
from tasks.episodes.groups import training_groups
from tasks.episodes.traces import log_traces, trace_of
from tests.tasks.episodes.practised_rounds import ADAPTER, CAPABILITY, Practised


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as opened:
        yield opened


def test_an_episode_is_told_turn_by_turn_without_secrets(store: Store) -> None:
    made = Practised(store, steps=1)
    messages = [
        {"role": "user", "content": "Cancel 7, my key is hunter22"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "cancel", "arguments": {"order": 7}}]},
        {"role": "tool", "content": "ok", "name": "cancel"},
        {"role": "assistant", "content": "7 is cancelled."},
        {"role": "user", "content": "Bye."},
    ]
    steps = [StepRow({}, [], 5, 120.0), StepRow({}, [], 6, 80.0)]
    given = {"purpose": "training", "adapter_id": "told", "messages": messages, "steps": steps}
    row = store.trajectory(made.episode("p", "cancel-7", 700_021, 0, 0.5, **given))
    (group,) = training_groups(store, made.round.id, "told", str).groups
    told = trace_of(row, group, CAPABILITY, lambda text: text.replace("hunter22", "(hidden)"))
    assert [(s.name, s.kind, s.milliseconds) for s in told.spans] == [
        ("turn", "LLM", 0.0), ("tool", "TOOL", 120.0), ("turn", "LLM", 0.0),
    ]  # fmt: skip
    assert told.spans[0].inputs == [{"role": "user", "content": "Cancel 7, my key is (hidden)"}]
    assert told.spans[0].outputs["calls"] == ["cancel(order=7)"]
    assert told.spans[1].outputs == {"role": "tool", "content": "ok"}
    assert told.spans[2].inputs == [{"role": "tool", "content": "ok"}]
    assert told.outputs == {
        "reward": 0.5, "success": False, "termination": "done", "checks missed": ["refunded"],
    }  # fmt: skip
    assert told.tags["trajectory"] == row.id
    assert (told.tags["reward"], told.tags["success"], told.tags["step"]) == ("0.5", "false", "1")
    assert "hunter22" not in repr(told)
    lost = store.trajectory(made.episode("p", "cancel-7", 700_021, 1, None, **given))
    assert trace_of(lost, group, CAPABILITY, str).failed


def test_what_a_step_took_stands_at_its_own_answer_also_behind_turns_that_are_left_out(store: Store) -> None:
    made = Practised(store, steps=1)
    one = [{"role": "assistant", "content": "look"}, {"role": "tool", "content": "ok", "name": "look"}]
    steps = [StepRow({}, [], 1, float(n)) for n in range(40)]
    given = {"purpose": "training", "adapter_id": "long", "messages": one * 40, "steps": steps}
    row = store.trajectory(made.episode("long", "t", 700_021, 0, 0.5, **given))
    (group,) = training_groups(store, made.round.id, "long", str).groups
    took = [s.milliseconds for s in trace_of(row, group, CAPABILITY, str).spans if s.kind == "TOOL"]
    assert took == [*map(float, range(6)), *map(float, range(34, 40))]


def test_at_most_so_many_of_a_group_are_logged_and_once(store: Store, tmp_path: Path) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", "shop", tmp_path / "artifacts")
    made = Practised(store, run=registry.start_run("training"))
    assert log_traces(registry, made.stored, made.figures(), str, each=0) == 0
    for _ in range(2):
        assert log_traces(registry, made.stored, made.figures(), str, each=2) == 8
    found = registry.client.search_traces(locations=[registry.experiment_id], run_id=made.run, max_results=100)
    assert len(found) == 8
    groups = training_groups(store, made.round.id, ADAPTER, str).groups
    rewards = {float(t.info.tags["reward"]) for t in found if t.data.spans[0].name.endswith(groups[1].title)}
    assert rewards == {0.0, 1.0}, "the least and the most rewarded"
