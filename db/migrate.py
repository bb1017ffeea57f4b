"""Bringing a database to the newest schema, once, however many processes open it at the same moment.

    python -m db.migrate "what the migration does"      # write the migration that db/schema.py owes
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, inspect, text

from db.engine import Engines, lock_writers, migration_engine, parse_url, show, speaking
from db.schema import HEAD, VERSION_TABLE
from errors import StoreError

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).parent / "migrations"


def ensure_schema(engines: Engines) -> None:
    """Create or upgrade the tables. Costs one query when they are already at the newest schema. Raises `StoreError`
    when the database does not answer, cannot be written, or was written by a newer version."""
    with speaking(engines.url):
        with engines.read.connect() as connection:
            if _version(connection) == HEAD:
                return
        move_schema(engines.url, HEAD)


def move_schema(url: URL, revision: str) -> None:
    """Upgrade or downgrade to `revision` ("base" is an empty database) in one transaction."""
    # Alembic takes longer to import than a database at the newest schema takes to open.
    from alembic import command
    from alembic.script import ScriptDirectory

    config = alembic_config(url)
    script = ScriptDirectory.from_config(config)
    known = [entry.revision for entry in script.walk_revisions()]
    engine = migration_engine(url)
    try:
        with speaking(url), engine.begin() as connection:
            lock_writers(connection)
            version = _version(connection)
            if version == revision:
                return
            if version is not None and version not in known:
                raise StoreError(
                    f"database {show(url)!r} was written by a newer version of this program (schema {version!r}, "
                    f"this one knows up to {HEAD!r}); install that version, or give another database"
                )
            config.attributes["connection"] = connection
            down = version is not None and (revision == "base" or known.index(revision) > known.index(version))
            (command.downgrade if down else command.upgrade)(config, revision)
            _check_references(connection)
    finally:
        engine.dispose()


def alembic_config(url: URL) -> Config:
    """Alembic's configuration for this package's migrations, without a file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "db:migrations")
    # The option is read through ConfigParser, where % begins an interpolation.
    config.set_main_option("sqlalchemy.url", url.render_as_string(hide_password=False).replace("%", "%%"))
    return config


def write_migration(message: str, folder: Path = MIGRATIONS) -> Path | None:
    """Write the migration from the newest one in `folder` to the tables of `db/schema.py`, and return its file; None,
    and no file, when the tables owe nothing. Its number is the newest one's plus one: `HEAD` has to name it."""
    from alembic import command
    from alembic.script import ScriptDirectory

    def only_changes(_context: Any, _revision: Any, directives: list[Any]) -> None:
        if directives[0].upgrade_ops.is_empty():
            directives.clear()

    with tempfile.TemporaryDirectory() as place:
        url = parse_url(f"sqlite:///{Path(place) / 'migrated.db'}")
        config = alembic_config(url)
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        newest = ScriptDirectory.from_config(config).get_current_head() or "0"
        command.upgrade(config, "head")
        written: Any = command.revision(
            config,
            message,
            autogenerate=True,
            rev_id=f"{int(newest) + 1:04}",
            process_revision_directives=only_changes,
        )
        return Path(written.path) if written else None


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()
    return version


def _check_references(connection: Connection) -> None:
    """SQLite's foreign keys are off while tables are rebuilt, so what they would have refused is looked for here."""
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if broken is not None:
            raise StoreError(
                f"migration would leave a row of {broken[0]!r} that refers to a missing row of {broken[2]!r}"
            )


if __name__ == "__main__":
    written = write_migration(" ".join(sys.argv[1:]) or "tables changed")
    print(f"{written}: read it, and set HEAD in db/schema.py" if written else "the tables owe no migration")
