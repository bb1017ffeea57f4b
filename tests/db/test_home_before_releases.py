"""A home that was made before there were releases opens, and its champions are release 1 of their target."""

from __future__ import annotations

from pathlib import Path

import pytest

from db import AdapterRow, AdapterState, ReleaseRow, ReleaseState, Round, open_store, row_id
from db.engine import migration_engine, parse_url
from db.migrate import move_schema, upgrade_database
from db.schema import HEAD

ROWS = Path(__file__).with_name("home_before_releases.sql")


@pytest.fixture
def old_home(database_url: str) -> str:
    """The stored home, in a database of its schema."""
    url = parse_url(database_url)
    move_schema(url, "0002")
    engine = migration_engine(url)
    with engine.begin() as connection:
        for line in ROWS.read_text(encoding="utf-8").splitlines():
            if not line.startswith("--"):
                connection.exec_driver_sql(line.replace("%", "%%"))
    engine.dispose()
    return database_url


def test_the_champions_become_release_1(old_home: str) -> None:
    assert upgrade_database(old_home) == ("0002", HEAD)
    with open_store(old_home) as store:
        rounds = {r.number: r for r in store.rows(Round)}
        found = {row.target: row for row in store.rows(ReleaseRow)}
        champions = {row.id for row in store.rows(AdapterRow, state=AdapterState.CHAMPION)}
        retired = {row.id for row in store.rows(AdapterRow, state=AdapterState.RETIRED)}
    # agentdojo has a registered adapter and a router, and no champion.
    assert sorted(found) == ["shop", "tau2:retail"]
    shop, tau2 = found["shop"], found["tau2:retail"]
    for row in found.values():
        assert (row.id, row.number, row.state) == (row_id("release", row.target, 1), 1, ReleaseState.LIVE)
        assert (row.parent_id, row.round_id, row.ended_at) == (None, None, None)
    refund, exchange = (row_id(rounds[n].id, "adapter", c) for n, c in ((2, "refund_payment"), (1, "exchange_item")))
    assert shop.members == {
        "exchange_item": {
            "adapter_id": exchange,
            "model": "trace-shop-exchange_item",
            "version": "1",
            "sha256": "2" * 64,
        },
        "refund_payment": {
            "adapter_id": refund,
            "model": "trace-shop-refund_payment",
            "version": "2",
            "sha256": "3" * 64,
        },
    }
    assert (shop.base, shop.base_revision, shop.data_hash) == ("smollm2-135m", "rev-a", "data-b")
    # The router is that of the newest round that fitted one: not of round 4, which failed, nor of another target.
    assert (shop.router, shop.router_path) == ("router-of-round-3", f"{rounds[3].id}/router")
    assert shop.live_at == rounds[2].finished_at
    # Two champions on two bases cannot answer together: the older one is retired, and named.
    older = row_id(rounds[5].id, "adapter", "look_up_first")
    assert list(tau2.members) == ["ask_user"]
    assert (tau2.base, tau2.router, tau2.router_path) == ("smollm2-135m", "", "")
    assert tau2.evidence == {"champions_of": [5, 6], "retired": [older]}
    assert champions == {refund, exchange, row_id(rounds[6].id, "adapter", "ask_user")}
    assert retired == {older, row_id(rounds[1].id, "adapter", "refund_payment")}
    assert {r.parent_id for r in rounds.values()} == {None}


def test_a_home_without_champions_has_no_release(database_url: str) -> None:
    move_schema(parse_url(database_url), "0002")
    upgrade_database(database_url)
    with open_store(database_url) as store:
        assert store.rows(ReleaseRow) == []
