"""What the doctor may not look at says nothing of what is in it, and ends no other check."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from db import copies
from settings import load_settings
from tasks.housekeeping.service_checks import mlflow
from tasks.housekeeping.stored_checks import database


def test_a_database_that_somebody_holds_is_not_called_damaged(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who restores a backup in its place loses what happened since."""
    monkeypatch.setattr(copies, "_WAIT_SECONDS", 0.0)
    settings = load_settings(home=settings_folder / "home")
    settings.folder.mkdir()
    for name, look in (("trace.db", database), ("mlflow.db", mlflow)):
        with closing(sqlite3.connect(settings.folder / name)) as holder:
            holder.execute("CREATE TABLE one (id INTEGER)")
            holder.commit()
            holder.execute("BEGIN EXCLUSIVE")
            found = look(settings)
        assert (found.level, found.said) == (
            "fault",
            f"{settings.folder / name} cannot be looked at (database is locked)",
        )
        assert "restore" not in found.do
        assert found.do.endswith("or wait for the process that holds it")
