"""A cluster's worker that hangs keeps its shards by its heartbeat; the flow that waits for it has a watch, which counts
only what moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from db import ShardRow
from tasks.shards import sharing
from tasks.unattended import progress

POLLS = 100


class Enough(Exception):
    """The test has seen what it waited for."""


def row(number: int, owner: str | None) -> ShardRow:
    work = {"episodes": [{"key": f"{number}-{i}"} for i in range(4)]}
    return ShardRow(id=f"s{number}", round_id="r", part="p", number=number, episodes=4, owner=owner, work=work)


def pulses(monkeypatch: pytest.MonkeyPatch, at: dict[int, Any]) -> list[int]:
    """The polls at which the flow's watch was told that work moved. `at` says what is so from a poll on: the open
    shards, or (an int) how many of their episodes are stored."""
    moved, poll, open_now, stored = list[int](), [0], list[ShardRow](), [0]

    class Hung:
        workers = 2
        submit = result = lambda self, *given: None
        done = lambda self, task: False  # noqa: E731

    def sleep(seconds: float) -> None:
        poll[0] += 1
        if poll[0] == POLLS:
            raise Enough

    def shards(part: str) -> list[ShardRow]:
        given = at.get(poll[0])
        if isinstance(given, int):
            stored[0] = given
        elif given is not None:
            open_now[:] = given
        return list(open_now)

    monkeypatch.setattr(progress, "pulse", lambda: moved.append(poll[0]))
    clock: Any = SimpleNamespace(sleep=sleep, monotonic=lambda: poll[0] * sharing.POLL_SECONDS)
    monkeypatch.setattr(sharing, "time", clock)
    play = sharing.SharedPlay.__new__(sharing.SharedPlay)
    made: Any = SimpleNamespace(
        settings=SimpleNamespace(runner="dask"), keep=lambda name, make: Hung(), round=SimpleNamespace(id="r"),
        store=SimpleNamespace(stored_ids=lambda keys: set(list(keys)[: stored[0]])),
    )  # fmt: skip
    held: Any = SimpleNamespace(open=shards, free=lambda part=None: [1])
    play.context, play.shards = made, held
    engine: Any = SimpleNamespace(window=8, options=SimpleNamespace(flushed=lambda: None))
    with pytest.raises(Enough):
        play._out(engine, "p", "it", sharing.PlayRun([], 0))
    return moved


def test_a_worker_that_holds_its_shard_and_does_nothing_keeps_no_flow_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pulses(monkeypatch, {0: [row(0, "gpu-7:1:x")]}) == [0]


def test_shards_that_are_taken_or_done_and_episodes_that_are_stored_are_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both, first, second = [row(0, None), row(1, None)], row(0, "a:1:x"), row(1, "a:1:x")
    found = pulses(monkeypatch, {0: both, 3: [first, both[1]], 5: [first, second], 7: [second], 8: 1, 45: 2})
    assert found[:4] == [0, 3, 5, 7]
    looks = sharing.STORED_SECONDS / sharing.POLL_SECONDS
    assert [8 <= at <= 8 + looks for at in found if 7 < at < 45] == [True]
    assert [at <= 45 + looks for at in found if at >= 45] == [True]
