"""An MLflow whose database does not open keeps nobody from looking at a release or leaving it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import requests

from db import ReleaseState, Store, open_store
from errors import StoreError
from models.adapters.addresses import REVISION_TABLE, known_revisions, newest_revision
from models.serving.fleet.releases import answered
from settings import Settings, load_settings
from settings_parts import UnattendedSettings
from tasks.operations import watch as watch_file
from tasks.operations.watch import BASE, Fall, Watched
from tasks.releases import moves
from tasks.releases.lifecycle import heal, live_release, new_candidate, publish, rollback
from tasks.releases.lookup import Basis
from tasks.round.registry import mlflow_failures, open_registry

MEMBER = {"adapter_id": "", "model": "trace-shop-refund", "version": "1", "sha256": "0" * 64}
AWAY = "a server that is away"
KINDS = ("garbage", "a folder", "an older schema", "an unknown schema", AWAY)


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings whose registry does not open, for the reason that the parameter says."""
    if request.param == AWAY:
        return load_settings(home=tmp_path, tracking="postgresql+psycopg://me:s3cret@127.0.0.1:1/mlflow")
    file = tmp_path / "mlflow.db"
    if request.param == "garbage":
        file.write_bytes(b"x" * 8192)
    elif request.param == "a folder":
        file.mkdir()
    else:
        older = min(known_revisions() - {newest_revision()})
        tables_of_mlflow(file, older if request.param == "an older schema" else "f" * 12)
    return load_settings(home=tmp_path)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """A store with one live release of one adapter."""
    with open_store(settings.database_url) as opened:
        basis = Basis("base", "revision", "data")
        row = new_candidate(opened, target="shop", parent=None, round_id=None, basis=basis, members={"refund": MEMBER})
        with opened.transaction() as connection:
            moves.swap(connection, "shop", None, row, (ReleaseState.RETIRED, "by hand"))
        yield opened


def tables_of_mlflow(file: Path, revision: str) -> None:
    """A database with tables of the names that MLflow looks for, of this revision."""
    from mlflow.store.db.base_sql_model import Base
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401 - it declares the tables

    with closing(sqlite3.connect(file)) as opened, opened:
        opened.execute("BEGIN")
        for name in Base.metadata.tables:
            opened.execute(f'CREATE TABLE "{name}" (id INTEGER)')
        opened.execute(f"CREATE TABLE {REVISION_TABLE} (version_num VARCHAR(32) NOT NULL)")
        opened.execute(f"INSERT INTO {REVISION_TABLE} VALUES (?)", (revision,))


def test_a_release_is_left_all_the_same(settings: Settings, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    began, registry = time.monotonic(), open_registry(settings, "shop")
    heal(store, registry, "shop")
    assert "MLflow cannot show what is live: " in caplog.text
    assert rollback(store, registry, "shop", to=0) is None
    assert live_release(store, "shop") is None
    assert "rolled back; MLflow follows with the next command: " in caplog.text
    assert "s3cret" not in caplog.text
    assert time.monotonic() - began < 10, "MLflow's own tries take 105 seconds"


def test_the_watch_tells_and_goes_back(settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(watch_file, "_tell", lambda settings, kind, text: told.append(f"{kind}: {text}"))
    settings = settings.model_copy(update={"unattended": UnattendedSettings(roll_back=True)})
    live, fall = live_release(store, "shop"), Fall(BASE, "fresh tasks", -30.0, 1e-6, "48 fresh tasks", significant=True)
    assert live is not None
    assert watch_file._act(settings, store, live, Watched("shop", 1, "", (fall,))).rolled_back == BASE
    assert [line.partition(" of ")[0] for line in told] == ["rolled-back: release 1"]


def test_it_is_one_error_of_ours_that_a_round_waits_for_only_where_a_wait_may_help(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlflow.store.db.utils.MAX_RETRY_COUNT", 1)
    registry = open_registry(settings, "shop")
    passes = "postgresql" in settings.tracking
    with pytest.raises(StoreError, match=r"MLflow at .* cannot be told what is live on shop: ") as publishing:
        publish(store, registry, "shop")
    with (
        pytest.raises(StoreError, match=r"MLflow at .* failed while it was asked: ") as asking,
        mlflow_failures(settings, "it was asked"),
    ):
        _ = registry.client
    with pytest.raises(StoreError, match="the registry does not answer: ") as serving:
        answered(lambda: registry.client)
    assert (publishing.value.transient, asking.value.transient) == (passes, passes)
    assert not [error for error in (publishing, asking, serving) if "s3cret" in str(error.value)]


def test_what_others_raise_in_a_stage_is_not_mlflow_s(settings_folder: Path) -> None:
    """Other libraries ask servers as MLflow does."""
    with pytest.raises(requests.ConnectionError), mlflow_failures(load_settings(), "a stage was done"):
        raise requests.ConnectionError("no such host")
