"""Empty databases that cost nothing: the first one that a process makes in SQLite is made by its migrations, and the
next ones are filled with the same statements. Most tests need a store, some need MLflow's; the migrations of each are
tested in tests/db and run by every process that a test starts."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

_statements: dict[str, list[str]] = {}


@contextmanager
def made_from_the_first() -> Iterator[None]:
    """Within it, what is imported of the store and of MLflow makes its databases like this."""
    with pytest.MonkeyPatch.context() as patch:
        if store := sys.modules.get("db.store"):
            # What it does beside the tables, it does as always: it finds the newest schema.
            patch.setattr(store, "ensure_schema", _like_the_first("store", store.ensure_schema, go_on=True))
        if mlflow := sys.modules.get("mlflow.store.db.utils"):
            made = _like_the_first("mlflow", mlflow._initialize_tables, go_on=False)
            patch.setattr(mlflow, "_initialize_tables", made)
        yield


def _like_the_first(name: str, really: Callable[[Any], None], go_on: bool) -> Callable[[Any], None]:
    def make(engine: Any) -> None:
        file = Path(engine.url.database or "") if engine.url.get_backend_name() == "sqlite" else Path()
        empty = file.parent.is_dir() and (not file.exists() or (file.is_file() and not file.stat().st_size))
        filled = empty and name in _statements and _fill(file, _statements[name])
        if go_on or not filled:
            really(engine)
        if empty and name not in _statements:
            with closing(sqlite3.connect(file)) as made:
                _statements[name] = [line for line in made.iterdump() if line not in ("BEGIN TRANSACTION;", "COMMIT;")]

    return make


def _fill(file: Path, statements: list[str]) -> bool:
    """Whether the file was empty until now, and could be written."""
    try:
        with closing(sqlite3.connect(file, timeout=30, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                return False
            for statement in statements:
                connection.execute(statement)
            connection.execute("COMMIT")
    except sqlite3.OperationalError:  # what is wrong, is said by who makes it otherwise
        return False
    return True
