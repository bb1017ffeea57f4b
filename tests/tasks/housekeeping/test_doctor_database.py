"""The doctor asks a database that MLflow keeps its registry in as a database, and changes nothing there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, text

from models.adapters.addresses import newest_revision
from settings import load_settings
from tasks.housekeeping import service_checks
from tasks.housekeeping.service_checks import mlflow

ADDRESS = "postgresql+psycopg://me:s3cret-s3cret@127.0.0.1:1/mlflow"


def test_one_that_is_away_is_told_without_its_password(settings_folder: Path) -> None:
    found = mlflow(load_settings(home=settings_folder, tracking=ADDRESS))
    assert (found.check, found.level) == ("mlflow", "fault")
    assert found.said.startswith("MLflow at postgresql+psycopg://127.0.0.1:1/mlflow does not answer (")
    assert "refused" in found.said
    assert "s3cret" not in found.said + found.do


@pytest.mark.parametrize(
    ("revision", "level", "said"),
    [
        ("", "ok", "answers, and its tables are made by the first round"),
        (newest_revision(), "ok", f", schema {newest_revision()}"),
        ("f" * 12, "fault", "which the installed MLflow does not know"),
    ],
)
def test_one_that_answers_is_asked_for_its_schema(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, revision: str, level: str, said: str
) -> None:
    engine = create_engine(f"sqlite:///{settings_folder}/any.db")
    if revision:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE alembic_version (version_num TEXT)"))
            connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})

    def stands_in(url: Any) -> Any:
        assert url.render_as_string(hide_password=False) == ADDRESS
        return engine

    monkeypatch.setattr(service_checks, "migration_engine", stands_in)
    monkeypatch.setattr(service_checks, "check_mlflow", lambda uri: None)
    found = mlflow(load_settings(home=settings_folder, tracking=ADDRESS))
    assert (found.check, found.level) == ("mlflow", level)
    assert found.said.startswith("postgresql+psycopg://127.0.0.1:1/mlflow")
    assert said in found.said
    assert inspect(engine).get_table_names() == (["alembic_version"] if revision else [])


def test_a_driver_that_is_missing_is_one_line(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: Any) -> Any:
        raise ModuleNotFoundError("No module named 'MySQLdb'")

    monkeypatch.setattr(service_checks, "migration_engine", missing)
    monkeypatch.setattr(service_checks, "check_mlflow", lambda uri: None)
    found = mlflow(load_settings(home=settings_folder, tracking=ADDRESS))
    assert (found.level, found.do) == ("fault", "install it")
    assert "needs a driver (No module named 'MySQLdb')" in found.said
