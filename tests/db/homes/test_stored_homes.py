"""A stored home of each released schema: refused where it is a server's, upgraded when told to, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from db import (
    AdapterRow,
    AdapterState,
    ConversationRow,
    MethodAccountRow,
    ReleaseRow,
    ReleaseState,
    Round,
    ShardRow,
    Store,
    open_store,
    row_id,
)
from db.engine import make_engines, migration_engine, parse_url
from db.migrate import known_revisions, move_schema, stored_revision, upgrade_database
from db.schema import HEAD
from errors import StoreError
from flows.cli.main import app

HOMES = Path(__file__).parent
REVISIONS = sorted(path.stem for path in HOMES.glob("*.sql"))


def stored_home(url: str, revision: str) -> str:
    """The home of a schema, in an empty database."""
    move_schema(parse_url(url), revision)
    engine = migration_engine(parse_url(url))
    with engine.begin() as connection:
        for line in (HOMES / f"{revision}.sql").read_text(encoding="utf-8").splitlines():
            if not line.startswith("--"):
                connection.exec_driver_sql(line.replace("%", "%%"))
    engine.dispose()
    return url


def revision_of(url: str) -> str | None:
    engines = make_engines(parse_url(url))
    try:
        return stored_revision(engines)
    finally:
        engines.dispose()


def check(store: Store, revision: str) -> None:
    """Everything that the home held is there, and what later schemas add follows from it."""
    (made,) = store.rows(Round)
    assert (made.number, made.target, made.seed, made.state, made.parent_id) == (1, "shop", 11, "done", None)
    assert store.stage(made.id, "rollout").row().result == {"trajectories": ["t1"]}
    played = store.trajectory("t1")
    assert (played.reward, played.success, len(played.steps), len(played.checks)) == (0.25, False, 2, 2)
    assert played.messages[0]["content"] == "cancel it, please: ü 🛒"
    (adapter,) = store.rows(AdapterRow)
    assert (adapter.state, adapter.sha256) == (AdapterState.CHAMPION, "3" * 64)
    (release,) = store.rows(ReleaseRow)
    assert (release.id, release.state) == (row_id("release", "shop", 1), ReleaseState.LIVE)
    assert release.members["refund_payment"]["adapter_id"] == adapter.id
    said = [(row.success, row.release) for row in store.rows(ConversationRow)]
    assert said == ([] if revision == "0001" else [(True, 1 if revision >= "0006" else None)])
    accounts = {row.method: row.episodes for row in store.rows(MethodAccountRow)}
    assert accounts == ({"grpo": 120} if revision >= "0004" else {})
    shards = [(row.part, row.state, row.episodes, row.work) for row in store.rows(ShardRow)]
    assert shards == ([("part-1", "done", 1, {})] if revision >= "0005" else [])


def test_every_released_schema_has_a_home() -> None:
    """Schema 0002 has a larger one of its own (`test_home_before_releases.py`)."""
    assert {*REVISIONS, "0002"} >= set(known_revisions())


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_home_is_upgraded_when_a_person_says_so(database_url: str, revision: str) -> None:
    url = stored_home(database_url, revision)
    if revision != HEAD and not url.startswith("sqlite"):
        with pytest.raises(StoreError, match=rf"schema '{revision}', .* needs '{HEAD}'; .*'trace-agent db upgrade'"):
            open_store(url)
        assert revision_of(url) == revision, "what refuses changes nothing"
    assert upgrade_database(url) == (revision, HEAD)
    assert upgrade_database(url) == (HEAD, HEAD)
    with open_store(url) as store:
        check(store, revision)


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_sqlite_home_is_upgraded_by_whoever_opens_it(tmp_path: Path, revision: str) -> None:
    with open_store(stored_home(f"sqlite:///{tmp_path}/trace.db", revision)) as store:
        check(store, revision)


def test_the_command_says_what_it_did(settings_folder: Path) -> None:
    home = settings_folder / "home"
    home.mkdir()
    stored_home(f"sqlite:///{home}/trace.db", "0001")
    said = [CliRunner().invoke(app, ["db", "upgrade", "--home", str(home)]).output for _ in range(2)]
    assert f"schema 0001 -> {HEAD}" in said[0]
    assert f"has the newest schema, {HEAD}, already" in said[1]


def test_a_newer_database_is_not_touched(database_url: str) -> None:
    stored_home(database_url, HEAD)
    engine = migration_engine(parse_url(database_url))
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE trace_alembic_version SET version_num = '9999'")
    engine.dispose()
    for work in (open_store, upgrade_database):
        with pytest.raises(StoreError, match=r"newer version.*'9999'.*install that version"):
            work(database_url)
    assert revision_of(database_url) == "9999"
