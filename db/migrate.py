"""Bringing a database to the newest schema, once, however many processes open it at the same moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import URL, Connection, inspect, text

from db.engine import Engines, limit_waiting, lock_writers, make_engines, migration_engine, parse_url, show, speaking
from db.schema import HEAD, VERSION_TABLE
from errors import StoreError

if TYPE_CHECKING:
    from alembic.config import Config


def ensure_schema(engines: Engines) -> None:
    """Create the tables of an empty database, and bring a SQLite file to the newest schema. Costs one query when they
    are there already. Raises `StoreError` when the database does not answer, cannot be written, was written by a newer
    version, or is a server's of an older one: other processes of the older version may use it, so a person decides
    when it is upgraded (`trace-agent db upgrade`)."""
    with speaking(engines.url):
        with engines.read.connect() as connection:
            version = _version(connection)
        if version == HEAD:
            return
        if version is not None and engines.url.get_backend_name() != "sqlite" and version in known_revisions():
            raise StoreError(
                f"database {show(engines.url)!r} has schema {version!r}, this program needs {HEAD!r}; stop what else "
                "uses it, make a backup of it, then run 'trace-agent db upgrade'"
            )
        move_schema(engines.url, HEAD)


def upgrade_database(address: str) -> tuple[str | None, str]:
    """Bring a database to the newest schema; the schema that it had (None: it was empty) and the one that it has.
    Raises `ConfigurationError` for an address that cannot work, `StoreError` for a database that was written by a newer
    version, or does not answer."""
    engines = make_engines(parse_url(address))
    try:
        before = stored_revision(engines)
        move_schema(engines.url, HEAD)
    finally:
        engines.dispose()
    return before, HEAD


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
            limit_waiting(connection)
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


def known_revisions() -> list[str]:
    """The revisions of the schema that this program knows, newest first."""
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(alembic_config(URL.create("sqlite")))
    return [entry.revision for entry in script.walk_revisions()]


def stored_revision(engines: Engines) -> str | None:
    """The revision of a database's schema as it stands, without bringing it to the newest; None for an empty one."""
    with speaking(engines.url), engines.read.connect() as connection:
        return _version(connection)


def alembic_config(url: URL) -> Config:
    """Alembic's configuration for this package's migrations, without a file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "db:migrations")
    # The option is read through ConfigParser, where % begins an interpolation.
    config.set_main_option("sqlalchemy.url", url.render_as_string(hide_password=False).replace("%", "%%"))
    return config


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
