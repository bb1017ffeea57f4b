"""Migrations, on both databases, with data in them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from store_examples import trajectory

from db import engine, open_store
from db.engine import migration_engine, parse_url
from db.migrate import alembic_config, move_schema
from db.new_migration import MIGRATIONS, write_migration
from db.schema import HEAD, TABLES, VERSION_TABLE
from errors import StoreError


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    engines = migration_engine(parse_url(url))
    with engines.begin() as connection:
        yield connection
    engines.dispose()


def test_up_down_up_with_data(database_url: str) -> None:
    with open_store(database_url) as store:
        round_ = store.start_round("shop", "d", 1, "laptop", {"a": 1})
        store.add_trajectories([trajectory(round_.id)])
    move_schema(parse_url(database_url), "base")
    with connected(database_url) as connection:
        assert set(inspect(connection).get_table_names()) <= {VERSION_TABLE}
    with open_store(database_url) as store:
        assert store.latest_round() is None
        round_ = store.start_round("shop", "d", 1, "laptop", {"a": 1})
        assert store.add_trajectories([trajectory(round_.id)]).added == 1
    move_schema(parse_url(database_url), HEAD)
    with open_store(database_url) as store:
        assert store.trajectory("t1").reward == 0.25


def test_what_another_process_holds_is_not_waited_for_without_end(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(database_url) as store:
        store.start_round("shop", "d", 1, "laptop", {"a": 1})
    monkeypatch.setattr(engine, "BUSY_MS", 100)
    with connected(database_url) as connection:
        connection.execute(text("SELECT * FROM rounds"))
        with pytest.raises(StoreError, match="another process holds"):
            move_schema(parse_url(database_url), "base")
    move_schema(parse_url(database_url), "base")


def test_the_migrated_database_is_what_the_tables_say(database_url: str) -> None:
    open_store(database_url).close()
    # Raises when autogenerate would write anything.
    command.check(alembic_config(parse_url(database_url)))
    with connected(database_url) as connection:
        assert set(inspect(connection).get_table_names()) == {*TABLES, VERSION_TABLE}


def test_head_is_the_newest_migration(tmp_path: object) -> None:
    script = ScriptDirectory.from_config(alembic_config(parse_url(f"sqlite:///{tmp_path}/x.db")))
    assert script.get_heads() == [HEAD]


def test_the_migration_that_the_tables_owe_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert write_migration("nothing", folder) is None
    (newest,) = (folder / "versions").glob(f"{HEAD}_*.py")
    newest.unlink()
    written = write_migration("conversations again", folder)
    assert written == folder / "versions" / f"{HEAD}_conversations_again.py"
    assert "op." in written.read_text()
    assert write_migration("nothing", folder) is None


def test_a_newer_database_is_left_alone(database_url: str) -> None:
    open_store(database_url).close()
    with connected(database_url) as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"newer version.*'9999'.*install that version") as caught:
        open_store(database_url)
    assert "s3cret" not in str(caught.value)
    with connected(database_url) as connection:
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one() == "9999"


def test_a_migration_that_fails_leaves_nothing(database_url: str) -> None:
    with connected(database_url) as connection:
        connection.execute(text("CREATE TABLE trajectories (mine INTEGER)"))
    with pytest.raises(StoreError, match="already exists"):
        open_store(database_url)
    with connected(database_url) as connection:
        assert set(inspect(connection).get_table_names()) <= {"trajectories", VERSION_TABLE}


def test_opening_again_is_quick(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/trace.db"
    open_store(url).close()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        open_store(url).close()
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.2
