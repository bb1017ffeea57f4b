"""Every store test runs twice: on a SQLite file and on a PostgreSQL server that is started here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest
from postgres_server import running_postgres

from db import Round, Store, open_store

_NUMBERS = count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with running_postgres() as url:
        yield url


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """An empty PostgreSQL database of its own."""
    name = f"trace_{next(_NUMBERS)}"
    with psycopg.connect(f"{postgres}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{postgres}/{name}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/trace.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with open_store(database_url) as opened:
        yield opened


@pytest.fixture
def round_(store: Store) -> Round:
    return store.start_round("shop", "data1", 7, "laptop", {"budget": 100, "nested": {"b": 1, "a": [1, 2]}}, "abc1234")
