"""Where MLflow believes its files to be. It stores absolute addresses, so a home that was moved has to be told.

MLflow has no function for this: its tables are changed directly, with nobody else at work on the file.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

from errors import StoreError

REVISION_TABLE = "alembic_version"
_OURS = "SELECT artifact_location FROM experiments WHERE name LIKE 'trace-%' AND artifact_location IS NOT NULL"


def known_revisions() -> set[str]:
    """The revisions of its schema that the installed MLflow knows, without importing it (two seconds)."""
    return set(_revisions())


def newest_revision() -> str:
    """The revision that the installed MLflow needs its database to have; "" where MLflow is not installed."""
    found = _revisions()
    return next(iter(set(found) - set(found.values())), "")


def _revisions() -> dict[str, str]:
    """Revision -> the one before it, as MLflow's migrations say."""
    spec = importlib.util.find_spec("mlflow")
    places = spec.submodule_search_locations if spec else None
    texts = [
        file.read_text(encoding="utf-8")
        for place in places or ()
        for file in Path(place, "store", "db_migrations", "versions").glob("*.py")
    ]
    return {_assigned("revision", text): _assigned("down_revision", text) for text in texts}


def _assigned(name: str, text: str) -> str:
    found = re.search(rf"^{name}\s*=\s*[\"'](\w+)[\"']", text, re.MULTILINE)
    return found.group(1) if found else ""


def artifact_roots(file: Path) -> set[Path]:
    """The folders in which the targets' experiments of a registry's SQLite file keep their artifacts; those in an
    object storage have none."""
    with _opened(file) as opened:
        found = [str(address) for (address,) in opened.execute(_OURS)]
    return {Path(_path(address)).parent for address in found if address.startswith(("file:", "/"))}


def move_addresses(file: Path, artifact_root: Path) -> int:
    """Make every address below the roots that a registry had lie below `artifact_root`; how many were changed.

    A text is an address when it begins with a root as a `file:` URI or a plain path. All text columns of all tables are
    looked at: which of them hold addresses differs between MLflow's versions. Raises `StoreError`.
    """
    moves = []
    for root in artifact_roots(file) - {artifact_root}:
        moves += [(root.as_uri(), artifact_root.as_uri()), (str(root), str(artifact_root))]
    changed = 0
    with _opened(file) as opened, opened:
        for table, column in _texts(opened):
            for old, new in moves:
                # At the end of a name: /data/home is no root of /data/home2. No LIKE: a path may hold its signs.
                changed += opened.execute(
                    f'UPDATE "{table}" SET "{column}" = ? || substr("{column}", ?) '
                    f'WHERE "{column}" = ? OR substr("{column}", 1, ?) = ?',
                    (new, len(old) + 1, old, len(old) + 1, f"{old}/"),
                ).rowcount
    return changed


def _texts(opened: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Table and column of everything that is declared as text."""
    names = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in names:
        for _, column, kind, *_ in opened.execute(f"PRAGMA table_info('{table}')").fetchall():
            if any(word in str(kind).upper() for word in ("CHAR", "TEXT", "CLOB")):
                yield table, str(column)


def _path(address: str) -> str:
    return unquote(urlparse(address).path) if address.startswith("file:") else address


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as opened:
            yield opened
    except sqlite3.Error as problem:
        raise StoreError(f"{file} is not a registry of MLflow that can be read and changed: {problem}") from problem
