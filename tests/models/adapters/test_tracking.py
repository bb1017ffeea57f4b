"""MLflow's own database, made without waiting for the disk, is the one that MLflow makes."""

from __future__ import annotations

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from models.adapters.registry import Registry
from models.adapters.tracking import make_database
from settings_parts import sqlite_url


@pytest.fixture(autouse=True)
def databases_like_the_first() -> None:
    """Here every database is made by MLflow's migrations: they are the matter."""


def schema(file: Path) -> dict[str, object]:
    """Columns of every table, all indexes, and the version (MLflow writes a table's checks in any order)."""
    with closing(sqlite3.connect(file)) as opened:
        names = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
        return {
            **{name: opened.execute(f"PRAGMA table_info('{name}')").fetchall() for name in names},
            "indexes": opened.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index' ORDER BY 1").fetchall(),
            "version": opened.execute("SELECT version_num FROM alembic_version").fetchall(),
        }


def test_the_file_is_that_of_mlflow(tmp_path: Path) -> None:
    from mlflow.store.db.utils import _safe_initialize_tables
    from sqlalchemy import create_engine

    theirs, ours = tmp_path / "theirs.db", tmp_path / "new" / "ours.db"
    _safe_initialize_tables(create_engine(f"sqlite:///{theirs}"))
    with ThreadPoolExecutor(2) as pool:  # two at once: one makes it, the other finds it
        list(pool.map(make_database, [f"sqlite:///{ours}"] * 2))
    assert schema(ours) == schema(theirs)
    assert len(schema(ours)) > 30


def test_a_file_whose_path_needs_quoting_is_made_where_it_was_named(tmp_path: Path) -> None:
    file = tmp_path / "a?b%41" / "mlflow.db"
    registry = Registry(sqlite_url(file), "shop", tmp_path / "artifacts")
    registry.end_run(registry.start_run("a/b/c"))
    assert [path.name for path in file.parent.iterdir()] == ["mlflow.db"]
    assert not (tmp_path / "a").exists()
    assert [path for path in tmp_path.rglob("*.db") if path != file] == []


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    registry = Registry(f"sqlite:///{file}", "shop", tmp_path / "artifacts")
    run = registry.start_run("a/b/c")
    registry.end_run(run)
    before = file.read_bytes()
    make_database(f"sqlite:///{file}")
    assert file.read_bytes() == before
    assert Registry(f"sqlite:///{file}", "shop", tmp_path / "artifacts").start_run("a/b/c") == run


def test_a_server_needs_no_file() -> None:
    make_database("http://127.0.0.1:1")


@pytest.mark.parametrize("before", [1, 60, 250])
def test_a_file_whose_making_was_cut_off_is_made_by_the_next_start(tmp_path: Path, before: int) -> None:
    """A process that dies between two statements, or a disk that is full there, leaves nothing that looks like it."""
    from sqlalchemy import Engine, event

    file, count = tmp_path / "mlflow.db", 0
    part = tmp_path / f".mlflow.db.{os.getpid()}.part"
    part.write_bytes(b"what a process with this number left")

    def dies(*_: object) -> None:
        nonlocal count
        count += 1
        if count == before:
            raise OSError("the disk is full")

    event.listen(Engine, "before_cursor_execute", dies)
    try:
        with pytest.raises(OSError, match="the disk is full"):
            make_database(f"sqlite:///{file}")
    finally:
        event.remove(Engine, "before_cursor_execute", dies)
    assert not file.exists()
    Registry(f"sqlite:///{file}", "shop", tmp_path / "artifacts").start_run("a/b/c")
    assert not list(tmp_path.glob(".mlflow.db*"))
