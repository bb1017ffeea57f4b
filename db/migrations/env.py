"""Alembic's entry: `move_schema` hands in a connection inside a transaction; the command line opens its own."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection, make_url

import db.schema  # noqa: F401  (fills the metadata)
from db.engine import migration_engine
from db.schema import VERSION_TABLE
from db.values.types import Base, Utc


def render_item(kind: str, item: Any, _context: Any) -> str | Literal[False]:
    """Migrations stand alone: they name SQLAlchemy's types, not this project's."""
    if kind == "type" and isinstance(item, Utc):
        return "sa.DateTime(timezone=True)"
    return False


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
        render_item=render_item,
        # The caller holds the transaction, so that a failed migration leaves nothing behind.
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    engine = migration_engine(make_url(str(context.config.get_main_option("sqlalchemy.url"))))
    with engine.begin() as opened:
        run(opened)
    engine.dispose()
