"""Opening a database: which URLs work, the settings of a connection, and errors that say what to do.

SQLite runs in WAL mode and every writing transaction begins with BEGIN IMMEDIATE: with the driver's default, three
processes that read and then write lose half of their updates without an error. Reads have an engine of their own.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.pool import NullPool

from db.values.text import dump_json
from db.values.types import utc_now
from errors import ConfigurationError, StoreError

BUSY_MS = 30_000
CACHE_KIB = 64 * 1024  # of a writing connection; taken as a large file needs it
CHECKPOINT_PAGES = 16_000  # 64 MiB of changes
EXAMPLES = "use sqlite:///runs/trace.db or postgresql://user:password@host:5432/trace"
# How the states of PostgreSQL's errors begin that the same work may not meet again: the connection was lost, another
# transaction was in the way, there are too many connections, a lock was not to be had, the server ends or begins.
_PASSING = ("08", "40", "53300", "55P03", "57P")
# What a server says that answers, and will say again; of the rest of those that let nobody in it only begins or ends.
_REFUSED = ("password", "authentication", "does not exist", "pg_hba.conf")
# Any number will do, as long as all writers of this project use the same one.
_WRITERS_LOCK = 7472616365


@dataclass(frozen=True)
class Engines:
    """One database: `write` for transactions that change it, `read` for those that must not."""

    url: URL
    write: Engine
    read: Engine

    def dispose(self, *, close: bool = True) -> None:
        """Drop all connections (`close=False` in a forked child, where they belong to the parent)."""
        self.write.dispose(close=close)
        self.read.dispose(close=close)


def show(url: URL) -> str:
    """The URL without its password."""
    hidden = url.update_query_dict({"password": "***"}) if "password" in url.query else url
    return hidden.render_as_string(hide_password=True)


def parse_url(url: str) -> URL:
    """A database URL (`sqlite:///FILE`, `postgresql://USER:PASSWORD@HOST/NAME`); `ConfigurationError` for others."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The value stays out of the message: what cannot be parsed may still hold a password.
        raise ConfigurationError(f"the database setting is not a database URL; {EXAMPLES}") from None
    scheme = parsed.drivername
    if scheme in ("sqlite", "sqlite+pysqlite"):
        if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
            raise ConfigurationError(
                f"database URL {show(parsed)!r} names no file to share between processes; {EXAMPLES}"
            )
        return parsed.set(drivername="sqlite+pysqlite")
    if scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigurationError(f"database URL {show(parsed)!r} has the unsupported scheme {scheme!r}; {EXAMPLES}")


def make_engines(url: URL) -> Engines:
    """The two engines of a parsed URL. Nothing is connected yet, but the folder of a SQLite file is made."""
    if url.get_backend_name() == "sqlite":
        folder = Path(str(url.database)).resolve().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot make the folder of {show(url)!r} ({error.strerror}); choose a folder that you may write to"
            ) from error
        return Engines(url, _sqlite_engine(url, write=True), _sqlite_engine(url, write=False))
    options: dict[str, Any] = {"hide_parameters": True, "json_serializer": dump_json, "pool_pre_ping": True}
    # Without a limit a host that drops packets would hold the caller for minutes.
    options["connect_args"] = {} if "connect_timeout" in url.query else {"connect_timeout": 10}
    write = create_engine(url, **options)
    read = create_engine(url, **options, execution_options={"postgresql_readonly": True})
    return Engines(url, write, read)


def migration_engine(url: URL) -> Engine:
    """An engine for migrations alone. SQLite rebuilds tables in them, which must not trip over foreign keys; that
    setting cannot be changed inside a transaction, so it needs connections of its own."""
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, write=True, foreign_keys=False, poolclass=NullPool)
    return create_engine(url, hide_parameters=True, poolclass=NullPool, connect_args={"connect_timeout": 10})


def _sqlite_engine(url: URL, *, write: bool, foreign_keys: bool = True, **options: Any) -> Engine:
    engine = create_engine(url, hide_parameters=True, json_serializer=dump_json, **options)

    @event.listens_for(engine, "connect")
    def _settings(connection: sqlite3.Connection, _record: Any) -> None:
        # None: the driver emits no BEGIN of its own; the listener below does.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        _enter_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        if write:
            # Ids are hashes: each row of a large file goes to another page of its indexes. More pages are kept, and
            # they reach the file less often: a fifth more rows a second at a million trajectories.
            connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
            connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        if not write:
            connection.execute("PRAGMA query_only=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _enter_wal(connection: sqlite3.Connection) -> None:
    """WAL is a lasting property of the file. Switching needs the file alone, and does not wait for a busy one."""
    deadline = time.monotonic() + BUSY_MS / 1000
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if (
                error.sqlite_errorcode not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                or time.monotonic() > deadline
            ):
                raise
            time.sleep(0.02)


def lock_writers(connection: Connection) -> None:
    """Make read-then-write safe until the transaction ends. SQLite's BEGIN IMMEDIATE already does."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITERS_LOCK})


def limit_waiting(connection: Connection) -> None:
    """Let no statement of the transaction wait longer for another's lock than a SQLite file is waited for. On a server
    what waits to change a table keeps out all that asks for the table after it."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SET LOCAL lock_timeout = {BUSY_MS}"))


def database_time(connection: Connection) -> datetime:
    """The clock of leases: the server's on PostgreSQL (machines disagree), this machine's on SQLite."""
    if connection.dialect.name == "postgresql":
        moment: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        return moment
    return utc_now()


@contextmanager
def speaking(url: URL) -> Iterator[None]:
    """Turn the driver's errors into a `StoreError` that names the database (without password) and what to do. It is
    `transient` where the database was away or held by others: the same work may go through later."""
    try:
        yield
    except SQLAlchemyError as error:
        if isinstance(error, StatementError) and isinstance(error.orig, StoreError):
            raise error.orig from error
        failed = StoreError(_explain(url, error))
        failed.transient = may_pass(error)
        raise failed from error
    except OverflowError as error:
        raise StoreError(f"database {show(url)!r}: {error}; store integers of at most 64 bits") from error


def may_pass(error: SQLAlchemyError) -> bool:
    """Whether the database was away, or held by others."""
    if isinstance(error, NoConnectionLeft):  # all are in use
        return True
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # the low byte of what SQLite answers
        return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    state: str | None = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated or state is not None:
        return error.connection_invalidated or str(state).startswith(_PASSING)
    # What did not come about, or broke off, has no state; nor has what the driver cannot send.
    said = str(error.orig).lower()
    broken = error.statement is None or "connection" in said
    return broken and isinstance(error, OperationalError) and not any(word in said for word in _REFUSED)


def _explain(url: URL, error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    said = " ".join(lines[:3]) or type(cause).__name__
    if url.password:
        said = said.replace(str(url.password), "***")
    return f"database {show(url)!r}: {said}; {_advice(error, said.lower())}"


def _advice(error: SQLAlchemyError, said: str) -> str:
    if isinstance(error, IntegrityError):
        return "the row breaks a rule of the schema (docs/2-database.md): store what it refers to first"
    for words, advice in (
        (("full", "no space", "disk i/o"), "free space on its disk, then run the same command again: nothing is lost"),
        (("readonly", "read-only", "unable to open", "permission denied"), "make the file and its folder writable"),
        (
            ("not a database", "malformed"),
            "this is no SQLite file or a damaged one: give another path or restore a copy",
        ),
        (("lock timeout",), "another process holds a table of it: stop what else uses it, then run this again"),
        (("locked",), "another process holds it: wait for that process, or use PostgreSQL for many writers"),
        (("password authentication", "no password"), "check the user name and password"),
        (("does not exist",), "create the database or role, or correct its name"),
        (
            ("connection", "timeout", "could not translate", "resolve"),
            "check that the server runs and host and port are right",
        ),
    ):
        if any(word in said for word in words):
            return advice
    if isinstance(error, DBAPIError):
        return "check that the database works and that its tables were not changed by hand"
    return "check the values that were to be stored: moments need a time zone"
