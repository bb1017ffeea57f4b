"""What `flows/prefect_server.py` mends in Prefect's server."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings
from sqlalchemy.ext.asyncio import AsyncSession

from flows.prefect_server import let_events_count, let_schedules_run


def test_bulk_inserts_pass_over_what_is_no_column() -> None:
    """Or its scheduler inserts no run (a real server: `tests/integration/test_deployment.py`)."""
    let_schedules_run()
    from prefect.server.database.orm_models import FlowRun, Run

    for kind, name in ((FlowRun, "state"), (Run, "estimated_run_time")):
        assert vars(kind)[name].bulk_dml_setter is not None
    assert let_schedules_run() == []


def test_an_event_is_counted_though_another_writes_after_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or SQLite refuses the count at once ("database is locked"), and Prefect gives the event up after four of them."""
    from prefect.server.events import triggers

    monkeypatch.setattr(triggers, "automations_session", triggers.automations_session)
    let_events_count()
    file = tmp_path / "prefect.db"
    with sqlite3.connect(file) as made:
        made.execute("CREATE TABLE bucket (by TEXT)")

    def another() -> None:
        with sqlite3.connect(file, timeout=30) as connection:
            connection.execute("INSERT INTO bucket VALUES ('another')")

    async def count() -> None:
        session: AsyncSession
        async with triggers.automations_session(begin_transaction=True) as session:
            assert (await session.execute(sqlalchemy.text("SELECT * FROM bucket"))).all() == []
            writing = asyncio.create_task(asyncio.to_thread(another))
            # Long enough for it to have written, were it let.
            await asyncio.wait([writing], timeout=0.2)
            await session.execute(sqlalchemy.text("INSERT INTO bucket VALUES ('this')"))
        await writing

    with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{file}"}):
        asyncio.run(count())
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT * FROM bucket").fetchall() == [("this",), ("another",)]
