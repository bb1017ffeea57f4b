"""The ledger of shards, on both databases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime

import pytest
from sqlalchemy import Connection, Engine, event, text

from db import Round, Shards, ShardState, Store, open_store
from db.engine import database_time
from db.rows.shards import ShardRow


@pytest.fixture
def shards(store: Store, round_: Round) -> Shards:
    ledger = store.shards(round_.id)
    ledger.owe("rollout", [(2, {"ids": ["a", "b"]}), (1, {"ids": ["c"]})])
    return ledger


def expire(store: Store, owner: str) -> None:
    with store.transaction() as connection:
        moment = "'2020-01-01 00:00:00.000000'" + ("" if store.url.startswith("sqlite") else "::timestamptz")
        connection.execute(text(f"UPDATE shards SET lease_until = {moment} WHERE owner = :owner"), {"owner": owner})


@contextmanager
def before_taking(call: Callable[[], object]) -> Iterator[None]:
    """`call` is called by each claim that has found a free shard, before it takes it."""

    def seen(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE shards SET state="):
            call()

    event.listen(Engine, "before_cursor_execute", seen)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", seen)


def test_each_shard_goes_to_one_worker_and_is_done_once(shards: Shards) -> None:
    first, second = shards.claim("rollout", "one", 30), shards.claim("rollout", "two", 30)
    assert first is not None
    assert second is not None
    assert (first.number, first.work, first.attempt, first.episodes) == (0, {"ids": ["a", "b"]}, 1, 2)
    assert (second.number, second.work) == (1, {"ids": ["c"]})
    assert shards.claim("rollout", "three", 30) is None
    assert not shards.finish(first.id, "two")
    assert shards.finish(first.id, "one")
    assert not shards.finish(first.id, "one")
    (left,) = shards.open("rollout")
    assert (left.id, left.owner) == (second.id, "two")


def test_a_shard_whose_lease_ran_out_is_owed_again(shards: Shards, store: Store) -> None:
    dead = shards.claim("rollout", "dead", 30)
    alive = shards.claim("rollout", "alive", 30)
    assert dead is not None
    assert alive is not None
    expire(store, "dead")
    assert shards.heartbeat("alive", 30) == 1
    assert [row.id for row in shards.free("rollout")] == [dead.id]
    taken = shards.claim("rollout", "alive", 30)
    assert taken is not None
    assert (taken.id, taken.owner, taken.attempt) == (dead.id, "alive", 2)
    assert not shards.finish(dead.id, "dead")  # it comes back, too late
    assert shards.heartbeat("dead", 30) == 0
    assert shards.heartbeat("alive", 30) == 2


def test_what_is_given_back_is_free_at_once(shards: Shards) -> None:
    taken = shards.claim("rollout", "one", 30)
    assert taken is not None
    assert shards.give_back("one") == 1
    again = shards.claim("rollout", "two", 30)
    assert again is not None
    assert (again.id, again.attempt) == (taken.id, 2)


def test_further_shards_are_numbered_on_and_parts_are_apart(shards: Shards, store: Store, round_: Round) -> None:
    shards.owe("rollout", [(1, {})])
    shards.owe("evaluate", [(1, {})])
    assert [(row.part, row.number, row.state) for row in shards.open()] == [
        ("evaluate", 0, ShardState.PENDING),
        ("rollout", 0, ShardState.PENDING),
        ("rollout", 1, ShardState.PENDING),
        ("rollout", 2, ShardState.PENDING),
    ]
    shards.withdraw("rollout")
    assert [row.part for row in shards.open()] == ["evaluate"]
    other = store.start_round("shop", "data1", 8, "laptop", {})
    assert store.shards(other.id).open() == []
    assert store.shards(other.id).claim("evaluate", "one", 30) is None


def test_workers_that_claim_at_once_never_get_the_same_shard(store: Store, round_: Round, database_url: str) -> None:
    """On PostgreSQL each has found the same shard free before any of them takes it. SQLite lets in one at a time."""
    store.shards(round_.id).owe("rollout", [(1, {}) for _ in range(12)])
    meeting = threading.Barrier(3 if database_url.startswith("postgresql") else 1)
    taken: dict[str, list[int]] = {owner: [] for owner in ("one", "two", "three")}
    first = threading.local()

    def meet() -> None:
        if not getattr(first, "over", False):
            first.over = True
            meeting.wait(20)

    def work(owner: str) -> None:
        with open_store(database_url) as own:
            while (row := own.shards(round_.id).claim("rollout", owner, 30)) is not None:
                taken[owner].append(row.number)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in taken]
    with before_taking(meet):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(number for numbers in taken.values() for number in numbers) == list(range(12))
    assert {row.attempt for row in store.shards(round_.id).open()} == {1}
    for owner, numbers in taken.items():
        assert store.shards(round_.id).heartbeat(owner, 30) == len(numbers)


@pytest.mark.integration
def test_a_lease_that_is_prolonged_in_the_last_moment_holds(postgres_url: str) -> None:
    """Another worker has found it run out, and has not taken it yet (on SQLite there is nothing between the two)."""
    with open_store(postgres_url) as store, open_store(postgres_url) as own:
        round_id = store.start_round("shop", "data1", 7, "laptop", {}).id
        shards = store.shards(round_id)
        shards.owe("rollout", [(1, {})])
        assert shards.claim("rollout", "late", 30) is not None
        expire(store, "late")
        prolonged: list[int] = []

        def prolong() -> None:
            if not prolonged:
                prolonged.append(own.shards(round_id).heartbeat("late", 30))

        with before_taking(prolong):
            assert shards.claim("rollout", "quick", 30) is None
        assert prolonged == [1]
        (held,) = shards.open()
        assert (held.owner, held.attempt) == ("late", 1)


def test_two_processes_that_owe_one_part_at_once_take_numbers_of_their_own(
    shards: Shards, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def moment(connection: Connection) -> datetime:
        with suppress(threading.BrokenBarrierError):  # one of them waits for the other's transaction, as it should
            both.wait(timeout=0.3)
        return database_time(connection)

    monkeypatch.setattr("db.shards.database_time", moment)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: shards.owe("rollout", [(1, {"ids": [name]})]), ["d", "e"]))
    found = {row.number: row.work["ids"] for row in store.rows(ShardRow, part="rollout")}
    assert sorted(found) == [0, 1, 2, 3]
    assert sorted([found[2], found[3]]) == [["d"], ["e"]]
