"""The ledger of shards, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from db import Round, Shards, ShardState, Store


@pytest.fixture
def shards(store: Store, round_: Round) -> Shards:
    ledger = store.shards(round_.id)
    ledger.owe("rollout", [(2, {"ids": ["a", "b"]}), (1, {"ids": ["c"]})])
    return ledger


def expire(store: Store, owner: str) -> None:
    with store.transaction() as connection:
        moment = "'2020-01-01 00:00:00.000000'" + ("" if store.url.startswith("sqlite") else "::timestamptz")
        connection.execute(text(f"UPDATE shards SET lease_until = {moment} WHERE owner = :owner"), {"owner": owner})


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
