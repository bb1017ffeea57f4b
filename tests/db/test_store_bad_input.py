"""Databases that do not work: one clear error, and never the password."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from postgres_server import PASSWORD, QUOTED_PASSWORD, free_port
from store_examples import trajectory

from db import Round, SpendRow, open_store
from db.writes import put_rows
from errors import ConfigurationError, StoreError

NOBODY = 65534


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A folder, and this process as a user who may not do everything (root may write anywhere)."""
    folder = Path(tempfile.mkdtemp(prefix="trace-readonly-"))
    root = os.geteuid() == 0
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def drop_privileges(folder: Path) -> None:
    """From here on nothing in `folder` can be written."""
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)


def said_by(url: str) -> str:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    shown = "".join(traceback.format_exception(caught.value))
    assert PASSWORD not in shown
    assert QUOTED_PASSWORD not in shown
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://trace:s3cret@host/trace", "unsupported scheme 'mysql'"),
        ("postgresql+asyncpg://trace:s3cret@host/trace", r"unsupported scheme 'postgresql\+asyncpg'"),
        ("http://trace:s3cret@host/trace", "unsupported scheme 'http'"),
        ("runs/trace.db", "not a database URL"),
        ("", "not a database URL"),
        ("postgresql://trace:s3cret@host:port/trace", "not a database URL"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_urls_that_cannot_work(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        open_store(url)
    assert "use sqlite:///" in str(caught.value)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_nobody_answers() -> None:
    said = said_by(f"postgresql://trace:{QUOTED_PASSWORD}@127.0.0.1:{free_port()}/trace")
    assert "trace:***@127.0.0.1" in said
    assert "check that the server runs" in said
    assert "resolve" in said_by(f"postgresql://trace:{QUOTED_PASSWORD}@nowhere.invalid/trace").lower()


@pytest.mark.integration
def test_the_server_refuses(postgres: str) -> None:
    assert "correct its name" in said_by(f"{postgres}/no_such_database")
    wrong = postgres.replace(QUOTED_PASSWORD, "other-s3cret")
    said = said_by(f"{wrong}/postgres")
    assert "check the user name and password" in said
    assert "other-s3cret" not in said


@pytest.mark.integration
def test_a_password_with_every_odd_sign_and_other_spellings_of_the_url(postgres_url: str) -> None:
    for url in (postgres_url, postgres_url.replace("postgresql://", "postgres://")):
        with open_store(url) as store:
            assert PASSWORD not in store.url
            assert QUOTED_PASSWORD not in store.url
            assert store.rows(Round) == []


@pytest.mark.integration
def test_a_server_that_goes_away_may_be_back(postgres_url: str) -> None:
    """A stage is tried again then, as when MLflow is away: a server that is restarted must not end a night."""
    for url in (f"postgresql://trace@127.0.0.1:{free_port()}/trace", postgres_url.replace("trace_", "no_such_")):
        with pytest.raises(StoreError) as caught:
            open_store(url)
        assert caught.value.transient == ("no_such_" not in url)
    with open_store(postgres_url) as store:
        round_ = store.start_round("shop", "d", 1, "laptop", {})
        others = "datname = current_database() AND pid <> pg_backend_pid()"

        def cut_off() -> None:
            with store.transaction() as connection:
                with closing(psycopg.connect(postgres_url)) as server:
                    server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
                put_rows(connection, [SpendRow(id="s", round_id=round_.id, stage="train", model="m")], replace=False)

        with pytest.raises(StoreError) as caught:
            cut_off()
        assert caught.value.transient
        assert store.rows(SpendRow) == [], "the next statement has a connection of its own"
        with pytest.raises(StoreError, match="rule of the schema") as caught:
            store.put([SpendRow(id="s", round_id="nowhere", stage="train", model="m")])
        assert not caught.value.transient


def test_a_file_that_another_process_holds_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("db.engine.BUSY_MS", 10)
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        with closing(sqlite3.connect(tmp_path / "trace.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="another process holds it") as caught:
                store.start_round("shop", "d", 1, "laptop", {})
            assert caught.value.transient
        with pytest.raises(StoreError, match="rule of the schema") as caught:
            store.put([SpendRow(id="s", round_id="nowhere", stage="train", model="m")])
        assert not caught.value.transient


def test_read_only_folder() -> None:
    with without_privileges() as folder:
        drop_privileges(folder)
        assert "writable" in said_by(f"sqlite:///{folder}/trace.db")
        assert "choose a folder" in said_by(f"sqlite:///{folder}/deeper/trace.db")


def test_read_only_file() -> None:
    with without_privileges() as folder:
        url = f"sqlite:///{folder}/trace.db"
        with open_store(url) as store:
            round_ = store.start_round("shop", "d", 1, "laptop", {})
        (folder / "trace.db").chmod(0o444)
        drop_privileges(folder)
        with pytest.raises(StoreError, match="writable"), open_store(url) as store:
            store.add_trajectories([trajectory(round_.id)])


def test_a_folder_and_a_foreign_file(tmp_path: Path) -> None:
    assert "writable" in said_by(f"sqlite:///{tmp_path}")
    (tmp_path / "text.db").write_text("no database at all " * 400)
    assert "no SQLite file" in said_by(f"sqlite:///{tmp_path}/text.db")
    (tmp_path / "file").write_text("")
    assert "choose a folder" in said_by(f"sqlite:///{tmp_path}/file/trace.db")


FILL = """
import resource, sys
from db import open_store
from errors import StoreError
from store_examples import trajectory
with open_store(sys.argv[1]) as store:
    round_ = store.start_round("shop", "d", 1, "laptop", {})
    store.add_trajectories([trajectory(round_.id, "before")])
    # A file may not grow past this: what a full disk looks like to the program.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
    try:
        for batch in range(1000):
            store.add_trajectories([trajectory(round_.id, f"{batch}-{i}", messages=["x" * 5000]) for i in range(20)])
            print(batch)
    except StoreError as error:
        print(error)
"""


def test_full_disk(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trace.db"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    }
    done = subprocess.run(
        [sys.executable, "-c", FILL, url], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *batches, said = done.stdout.strip().splitlines()
    assert "free space" in said
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    # With space again the same work goes on, and nothing that was stored is lost.
    with open_store(url) as store:
        assert len(store.trajectory_frame()) == 1 + 20 * len(batches)
        assert store.add_trajectories([trajectory(store.trajectory("before").round_id, "after")]).added == 1


def test_sqlite_full_error(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        round_ = store.start_round("shop", "d", 1, "laptop", {})

        def fill() -> None:
            with store.transaction() as connection:
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
                connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
                connection.exec_driver_sql("UPDATE rounds SET reason = ?", ("x" * 100_000,))

        with pytest.raises(StoreError, match="full; free space"):
            fill()
        assert store.round(round_.id).reason == ""
