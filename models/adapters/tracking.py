"""Making MLflow's own SQLite file in a second instead of five.

MLflow makes its tables in some 300 statements that are each a transaction, and each waits for the disk: in a new home
that is time in which nothing else happens. The same statements without waiting, and one wait at the end, give the same
file.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

SQLITE = "sqlite:///"
_MAKING = threading.Lock()  # threads of one process would make the same part


def make_database(tracking_uri: str) -> None:
    """Make the file of a `sqlite:////absolute/path` when it is not there, with its tables. It appears whole: what a
    process that died has left of it is never taken for it. Other processes may make it at the same moment: the first
    one's stays. Nothing happens for a server's URL or a file that is there. Raises OSError, or SQLAlchemy's error,
    where it cannot be written."""
    if not tracking_uri.startswith(SQLITE):
        return
    from sqlalchemy import make_url

    file = Path(str(make_url(tracking_uri).database))
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with _MAKING:
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove(part)  # of a process that had the same number
        try:
            _make(part)
            _appear(part, file)
        finally:
            _remove(part)


def _make(part: Path) -> None:
    """Write the database there, and wait for the disk once."""
    from mlflow.store.db.utils import _safe_initialize_tables
    from sqlalchemy import URL, create_engine, event

    engine = create_engine(URL.create("sqlite", database=str(part)))

    @event.listens_for(engine, "connect")
    def _do_not_wait(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    try:
        _safe_initialize_tables(engine)  # what MLflow's store calls first; on whole tables it does nothing
    finally:
        engine.dispose()
    with part.open("rb") as made:
        os.fsync(made.fileno())


def _appear(part: Path, file: Path) -> None:
    """Give the file its name, unless another process was first: a rename would replace what that one already uses."""
    try:
        os.link(part, file)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not file.exists():
            part.rename(file)


def _remove(part: Path) -> None:
    """Remove the part with the files that SQLite keeps beside it: an old journal would be played into a new part."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        Path(f"{part}{suffix}").unlink(missing_ok=True)
