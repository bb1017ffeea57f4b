"""What the doctor may not look at says nothing of what is in it, and ends no other check."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from db import copies
from settings import load_settings
from tasks.housekeeping import doctor
from tasks.housekeeping.findings import Finding, well
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


def test_a_folder_that_this_user_may_not_enter_ends_its_own_checks_alone(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_: object) -> Iterator[Finding]:
        yield well("versions", "as needed")
        raise PermissionError(errno.EACCES, "Permission denied", "/data/home")

    monkeypatch.setattr(doctor, "machine_findings", closed)
    for name in ("round_findings", "service_findings"):
        monkeypatch.setattr(doctor, name, lambda _: iter(()))
    monkeypatch.setattr(doctor, "stored_findings", lambda *_: iter([well("database", "there")]))
    found = doctor.examine(load_settings(home=settings_folder / "home"))
    assert [(f.check, f.level) for f in found] == [("versions", "ok"), ("machine", "fault"), ("database", "ok")]
    assert found[1].said == "/data/home cannot be looked at (Permission denied)"
    assert found[1].do == "let this user read and write it, or give another path"
