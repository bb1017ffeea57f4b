"""Every store test runs twice: on a SQLite file and on a PostgreSQL server (`database_url` of tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from db import Round, Store, open_store


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with open_store(database_url) as opened:
        yield opened


@pytest.fixture
def round_(store: Store) -> Round:
    return store.start_round("shop", "data1", 7, "laptop", {"budget": 100, "nested": {"b": 1, "a": [1, 2]}}, "abc1234")


@pytest.fixture(autouse=True)
def databases_like_the_first() -> None:
    """Here every database is made by its migrations: they are the matter."""
