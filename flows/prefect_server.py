"""Prefect's server, whose schedules run: `python -m flows.prefect_server --port 4200`.

With SQLAlchemy 2.1 the scheduler of Prefect 3.8.8 inserts no run at all ("Can't evaluate bulk DML statement; please
supply a bulk_dml decorated function", in the server's log only): its rows name hybrid attributes, which SQLAlchemy 2.0
passed over in a bulk insert and 2.1 refuses unless they say what to do. Here they say so: nothing, as before. Leases of
concurrency limits are kept in files: in memory, Prefect's default, they are gone after a restart, and what they held
stays taken for ever. On SQLite an event that an automation counts takes the database's write lock before it reads:
Prefect reads first, and where another transaction writes in between, SQLite refuses the count at once, however long it
may wait otherwise. Four refusals within a second, and the event is lost: a run whose begin was lost was then called
crashed while it ran. For the rest this is `prefect server start`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from prefect.settings import get_current_settings
from sqlalchemy.ext.hybrid import hybrid_property

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

LEASES = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", "prefect.server.concurrency.lease_storage.filesystem"


def let_schedules_run() -> list[str]:
    """Have bulk inserts pass over the hybrid attributes of Prefect's tables; their names, none the second time."""
    from prefect.server.database import orm_models

    mended = []
    for mapper in orm_models.Base.registry.mappers:
        for kind in mapper.class_.__mro__:
            for name, found in vars(kind).items():
                if isinstance(found, hybrid_property) and getattr(found, "bulk_dml_setter", 0) is None:
                    found.bulk_dml_setter = _pass_over  # type: ignore[assignment]
                    mended.append(f"{kind.__name__}.{name}")
    return mended


def _pass_over(cls: type, mapping: Mapping[str, Any], value: Any) -> None:
    """What SQLAlchemy 2.0 did with a hybrid attribute in a bulk insert."""


def let_events_count() -> None:
    """Have transactions that count an event for an automation wait for their turn to write before they read."""
    from prefect.server.events import triggers

    triggers.automations_session = _waiting_session  # type: ignore[assignment]


@asynccontextmanager
async def _waiting_session(begin_transaction: bool = False) -> AsyncIterator[AsyncSession]:
    from prefect.server.database import provide_database_interface

    context = provide_database_interface().session_context(begin_transaction, with_for_update=begin_transaction)
    async with context as session:
        yield session


def main() -> None:
    """Serve until stopped; migrations and services are the application's own."""
    os.environ.setdefault(*LEASES)
    configured = get_current_settings().server.api
    given = argparse.ArgumentParser(description="Prefect's server, whose schedules run")
    given.add_argument("--host", default=configured.host)
    given.add_argument("--port", type=int, default=configured.port)
    options = given.parse_args()
    let_schedules_run()
    let_events_count()
    from prefect.server.api.server import create_app

    uvicorn.run(create_app, factory=True, host=options.host, port=options.port, log_level="warning", lifespan="on")


if __name__ == "__main__":
    main()
