"""A home whose database is gone, or looked for elsewhere, is no new one: its rounds would begin from the bare base."""

from __future__ import annotations

from pathlib import Path

import pytest

from db import open_store
from tasks.housekeeping.stored_checks import database
from tests.tasks.housekeeping.kept_homes import settings_of


def test_a_database_that_is_gone_is_a_fault(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "home")
    with open_store(settings.database_url) as store:
        place = settings.folder / store.start_round("shop", "data", 1, "laptop", {}).id
    place.mkdir()
    (place / "report.html").touch()
    assert database(settings).level == "ok"
    elsewhere = settings_of(tmp_path / "home", database=f"sqlite:///{tmp_path}/mistyped/trace.db")
    found = database(elsewhere)
    assert (found.level, found.do) == ("fault", "correct TRACE_DATABASE if it names another one, or restore a backup")
    assert f"mistyped/trace.db is not there, and {place.name} has a report" in found.said
    for file in settings.folder.glob("trace.db*"):
        file.unlink()
    assert database(settings).level == "fault"


@pytest.mark.parametrize("there", ["", "mlflow.db", "up/mlflow.log"])
def test_a_home_without_rounds_is_new(tmp_path: Path, there: str) -> None:
    """As services have made it that were started before the first round."""
    if there:
        (tmp_path / "home" / there).parent.mkdir(parents=True)
        (tmp_path / "home" / there).touch()
    assert database(settings_of(tmp_path / "home")).level == "ok"
