"""What tests are given instead of a migrated database is one: the same tables, indices and version."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from db import open_store
from tests.db.homes import databases_made


def told(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as connection:
        return sorted(connection.iterdump())


def test_a_store_is_as_its_migrations_make_it(tmp_path: Path) -> None:
    with databases_made.made_from_the_first():
        for name in ("first", "second"):
            open_store(f"sqlite:///{tmp_path}/{name}.db").close()
    open_store(f"sqlite:///{tmp_path}/migrated.db").close()
    assert told(tmp_path / "second.db") == told(tmp_path / "first.db") == told(tmp_path / "migrated.db")
    assert any("alembic" in line or "version" in line for line in told(tmp_path / "second.db"))


def test_only_what_is_empty_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def really(engine: Any) -> None:
        made.append(Path(engine.url.database).name)
        with closing(sqlite3.connect(engine.url.database)) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS things (name TEXT)")

    found = ModuleType("found")
    found._initialize_tables = really  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow.store.db.utils", found)
    monkeypatch.setattr(databases_made, "_statements", {})
    with closing(sqlite3.connect(tmp_path / "old")) as connection:
        connection.execute("CREATE TABLE others (name TEXT)")
    with databases_made.made_from_the_first():
        for name in ("old", "new", "newer"):
            url = SimpleNamespace(database=str(tmp_path / name), get_backend_name=lambda: "sqlite")
            found._initialize_tables(SimpleNamespace(url=url))
    assert made == ["old", "new"]
    assert told(tmp_path / "newer") == told(tmp_path / "new")
    assert found._initialize_tables is really
