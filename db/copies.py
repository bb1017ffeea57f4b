"""Copies of SQLite files that other processes write to, and what revision of a schema such a file has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy.engine import make_url

from db.engine import parse_url
from errors import NoHome, StoreError

_WAIT_SECONDS = 30.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite URL (absolute); None for another kind of database."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    return Path(parsed.database).resolve()


def check_there(url: str) -> None:
    """Raise `NoHome` where a SQLite file is not there: to open it would make it, and its folder, and a home whose name
    was mistyped would be told of as an empty one. Raises `ConfigurationError` for an address that cannot work."""
    parse_url(url)
    file = sqlite_file(url)
    if file is not None and not file.is_file():
        raise NoHome(
            f"there is no home in {file.parent}: {file} is missing; give another --home, or run 'trace-agent improve' "
            "there first"
        )


def copy_sqlite(source: Path, destination: Path) -> None:
    """One moment of a SQLite file, as a file of its own; writers go on meanwhile (SQLite's backup).

    The copy is in one step: taken page by page it begins again whenever somebody writes, and under a round it would
    not end. Raises `StoreError` for a file that is damaged or cannot be read, and for a full disk.
    """
    with _speaking(source), _opened(source) as before, closing(sqlite3.connect(destination)) as after:
        before.backup(after)
        after.execute("PRAGMA journal_mode=DELETE")  # the copy is one file, without -wal and -shm beside it
        found = after.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreError(f"{source} is damaged ({found}); restore an earlier backup, then back that up")


def problem_of_sqlite(file: Path) -> str:
    """What SQLite finds damaged in a file, "" for nothing. Raises `StoreError` for one that it cannot look at, as
    another process holds it or this user may not: that says nothing of what is in it."""
    try:
        with _opened(file) as opened:
            found = str(opened.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.Error as problem:
        if getattr(problem, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:  # the low byte of what SQLite answers
            return str(problem)
        raise StoreError(
            f"{file} cannot be looked at ({problem}); make the file and its folder writable for this user, or wait for "
            "the process that holds it"
        ) from problem
    return "" if found == "ok" else found


def sqlite_revision(file: Path, table: str) -> str:
    """The schema's revision in a SQLite file, from Alembic's `table`; "" where it has none. Raises `StoreError`."""
    with _speaking(file), _opened(file) as opened:
        known = opened.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone()
        found = opened.execute(f'SELECT version_num FROM "{table}"').fetchone() if known else None
    return "" if found is None else str(found[0])


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write and makes no file."""
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=_WAIT_SECONDS)) as opened:
        yield opened


@contextmanager
def _speaking(file: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as problem:
        raise StoreError(
            f"{file} cannot be copied or read ({problem}); free space if the disk is full, else see whether it is the "
            "database that it should be: 'trace-agent doctor'"
        ) from problem
