"""A home that is backed up, removed and restored elsewhere goes on; what cannot be restored leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import threading
import zipfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from db import StageRow, open_store
from db.schema import HEAD
from flows.cli.main import app
from models.adapters.addresses import artifact_roots, known_revisions
from models.router.router import Router
from tasks.housekeeping.backup import make_backup
from tasks.housekeeping.manifest import MANIFEST
from tasks.housekeeping.restore import restore_backup
from tasks.releases.lifecycle import check_files, heal, live_release, releases_of, rollback
from tasks.serving.releases import HomeReleases
from tests.tasks.housekeeping.kept_homes import KEY, make_home, opened, registry_of, settings_of
from tests.tasks.releases.release_homes import BASE, REVISION


def values_with(file: Path, words: str) -> list[tuple[str, str]]:
    """Table and column of every value of a SQLite file that holds `words` anywhere, whatever its type."""
    found = []
    with closing(sqlite3.connect(file)) as opened_file:
        tables = [name for (name,) in opened_file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for _, column, *_ in opened_file.execute(f"PRAGMA table_info('{table}')").fetchall():
                query = f'SELECT count(*) FROM "{table}" WHERE instr(CAST("{column}" AS TEXT), ?)'
                if opened_file.execute(query, (words,)).fetchone()[0]:
                    found.append((table, column))
    return found


def test_the_home_goes_on_elsewhere(original: Path, archive: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved" / "home"
    made = restore_backup(archive, settings_of(moved))
    assert (made.home, made.rounds) == (str(original), 3)
    # The old place is gone: what still pointed there would fail.
    hidden = original.with_name("hidden")
    original.rename(hidden)
    try:
        with opened(moved) as home:
            home.check()
            for release in releases_of(home.store, "shop"):
                check_files(home.registry, release)
            identity: Any = Identity(BASE, REVISION)
            served = HomeReleases(home.store, home.registry, moved, "shop", identity, fits)
            found = served.live()
            assert found is not None
            assert (found.number, sorted(found.members), found.problem) == (2, ["exchange", "refund"], "")
            for adapter in found.members.values():
                served.download(adapter, tmp_path / "served")
            # The page is where the store says; the run takes another one.
            (told,) = [row for row in home.store.rows(StageRow) if row.name == "report"]
            assert told.result is not None
            assert Path(told.result["page"]).read_text() == "<html>the report</html>"
            assert Path(told.result["page"]).is_relative_to(moved)
            run = home.registry.start_run(f"{told.round_id}-round")
            home.registry.log_report(run, "<html>again</html>")
            assert len(list((moved / "mlartifacts").rglob("report.html"))) == 1
            # The next round's release, and the way back.
            live = live_release(home.store, "shop")
            assert live is not None
            home.promoted({"refund": home.member("refund")})
            assert home.states() == {1: "retired", 2: "retired", 3: "live"}
            rollback(home.store, home.registry, "shop")
            home.check()
    finally:
        hidden.rename(original)


@dataclass(frozen=True)
class Identity:
    base: str
    revision: str


def fits(_: Router) -> None:
    return None


def test_no_address_of_the_old_place_is_left(tmp_path: Path) -> None:
    """Every column of MLflow's schema in which it keeps an address: experiments, runs, logged models, versions,
    traces. A run's parameter that only speaks of another folder with a like name stays."""
    import mlflow

    old, new = tmp_path / "old", tmp_path / "new"
    make_home(old)
    registry = registry_of(old)
    run = registry.start_run("more")
    client = registry.client
    client.log_param(run, "near", f"{old}/mlartifacts2/file")
    client.create_registered_model("by-hand")
    client.create_model_version("by-hand", source=f"{(old / 'mlartifacts').as_uri()}/shop/x", run_id=run)
    with registry.as_global_uri():
        span = mlflow.start_span_no_context("turn", experiment_id=registry.experiment_id)
        span.end()
        mlflow.flush_trace_async_logging()
    before = values_with(old / "mlflow.db", str(old))
    assert {
        ("experiments", "artifact_location"),
        ("runs", "artifact_uri"),
        ("logged_models", "artifact_location"),
        ("model_versions", "source"),
        ("model_versions", "storage_location"),
        ("trace_tags", "value"),
        ("params", "value"),
    } <= set(before)
    make_backup(settings_of(old), tmp_path / "b.zip", "1")
    restore_backup(tmp_path / "b.zip", settings_of(new))
    assert values_with(new / "mlflow.db", f"{old}/") == [("params", "value")]
    assert values_with(new / "mlflow.db", f"{old}/mlartifacts2/file") == [("params", "value")]
    assert values_with(new / "trace.db", f"{old}/") == []
    assert {c for c in before if c[0] != "params"} <= set(values_with(new / "mlflow.db", f"{new}/mlartifacts"))
    assert artifact_roots(new / "mlflow.db") == {new / "mlartifacts"}


def test_a_home_that_was_moved_by_hand_is_mended(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "by hand")
    with opened(tmp_path / "by hand") as home, pytest.raises(Exception, match="outside the artifact root"):
        check_files(home.registry, home.newest())
    make_backup(settings_of(tmp_path / "by hand"), tmp_path / "b.zip", "1")
    restore_backup(tmp_path / "b.zip", settings_of(tmp_path / "right"))
    with opened(tmp_path / "right") as home:
        check_files(home.registry, home.newest())


def test_what_is_no_part_of_a_home_is_not_copied(archive: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        names = file.namelist()
        assert not any(KEY.encode() in file.read(name) for name in names)
    manifest = json.loads(zipfile.ZipFile(archive).read(MANIFEST))
    assert set(names) == {MANIFEST, *manifest["members"]}
    assert {name.split("/")[0] for name in names} - {"trace.db", "mlflow.db", "mlartifacts", MANIFEST} == {
        name.split("/")[0] for name in names if "/training/" in name
    }
    assert {".env", "keys.txt"} <= set(manifest["not_copied"])
    assert not {"trace.db-wal", "served", "mlartifacts"} & set(manifest["not_copied"])
    assert manifest["format"] == 1
    assert manifest["revision"] == HEAD
    assert manifest["registry_revision"] in known_revisions()


def test_a_backup_while_a_round_writes_is_of_one_moment(tmp_path: Path) -> None:
    """Releases are made while backups are: each restored home is whole, and holds what was there when it began."""
    home_folder = tmp_path / "home"
    make_home(home_folder)
    stop = threading.Event()
    made: list[int] = []

    def work() -> None:
        with opened(home_folder) as home:
            while not stop.is_set():
                home.promoted({"refund": home.member("refund")})
                made.append(1)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for number in range(3):
            before = len(made)
            make_backup(settings_of(home_folder), tmp_path / f"{number}.zip", "1")
            restore_backup(tmp_path / f"{number}.zip", settings_of(tmp_path / f"new{number}"))
            with opened(tmp_path / f"new{number}") as home:
                assert len(releases_of(home.store, "shop")) >= 2 + before
                for release in releases_of(home.store, "shop"):
                    check_files(home.registry, release)
    finally:
        stop.set()
        worker.join()
    assert made


def test_what_the_store_names_is_in_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is made between the copies of the two databases: the later copy may know more, never less."""
    from tasks.housekeeping import backup

    make_home(tmp_path / "home")
    copy, copied = backup.copy_sqlite, []

    def promoting(source: Path, destination: Path) -> None:
        copy(source, destination)
        copied.append(source.name)
        if len(copied) == 1:
            with opened(tmp_path / "home") as home:
                home.promoted({"refund": home.member("refund")})

    monkeypatch.setattr(backup, "copy_sqlite", promoting)
    make_backup(settings_of(tmp_path / "home"), tmp_path / "b.zip", "1")
    assert copied == ["trace.db", "mlflow.db"]
    restore_backup(tmp_path / "b.zip", settings_of(tmp_path / "new"))
    with opened(tmp_path / "new") as home:
        assert home.states() == {1: "retired", 2: "live"}
        heal(home.store, home.registry, "shop")  # MLflow's aliases are those of the release that came after
        home.check()
        for release in releases_of(home.store, "shop"):
            check_files(home.registry, release)


def test_a_file_that_goes_takes_its_folder_along(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is removed meanwhile would come back complete and empty."""
    from tasks.housekeeping import backup

    steady = backup._Writer._steady

    def losing(self: Any, path: Path) -> Any:
        if path.name in ("optimizer.pt", "hung.a.1.txt"):
            raise FileNotFoundError(path)
        return steady(self, path)

    monkeypatch.setattr(backup._Writer, "_steady", losing)
    place = next(original.glob("*/report.html")).parent
    (place / "hung.a.1.txt").touch()  # goes when its process ends; the round stays
    made = make_backup(settings_of(original), tmp_path / "b.zip", "1")
    (place / "hung.a.1.txt").unlink()
    assert not any("checkpoint-2" in name for name in made.members)
    assert [name.rpartition("/")[2] for name in made.left_out] == ["checkpoint-2"]
    assert f"{place.name}/report.html" in made.members
    restore_backup(tmp_path / "b.zip", settings_of(tmp_path / "new"))
    assert not list((tmp_path / "new").rglob("checkpoint-2"))


@pytest.mark.parametrize(("removed", "code"), [(False, 1), (True, 0)])
def test_a_backup_that_lacks_what_the_home_has_ends_with_an_error(
    removed: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was removed while it was copied is no loss."""
    from tasks.housekeeping import backup

    home = tmp_path / "home"
    with open_store(settings_of(home).database_url) as store:
        checkpoint = home / store.start_round("shop", "data", 1, "laptop", {}).id / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "optimizer.pt").touch()
    steady = backup._Writer._steady

    def losing(self: Any, path: Path) -> Any:
        if path.name == "optimizer.pt":
            if removed:
                shutil.rmtree(path.parent)
            raise FileNotFoundError(path)
        return steady(self, path)

    monkeypatch.setattr(backup._Writer, "_steady", losing)
    done = CliRunner().invoke(app, ["backup", str(tmp_path / "b.zip"), "--home", str(home)], catch_exceptions=False)
    assert (done.exit_code, "this backup is not whole" in done.output) == (code, not removed)
    assert "left out" in done.output
    assert "checkpoint-2" in done.output


@pytest.mark.parametrize(
    ("shut", "lacks"),
    [
        ("report.html", "report.html"),
        ("training", "training"),  # its names cannot be read
        ("training/final/a.bin", "training/final"),  # half of a folder is no part of a backup
        ("training/final/*", "training/final"),  # its names can be read, and nothing in it
    ],
)
def test_what_this_user_may_not_read_is_named_and_ends_with_an_error(
    shut: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what a container that ran as root has left in the home."""
    from tasks.housekeeping import backup

    home = tmp_path / "home"
    with open_store(settings_of(home).database_url) as store:
        place = home / store.start_round("shop", "data", 1, "laptop", {}).id
    (place / "training" / "final").mkdir(parents=True)
    for name in ("report.html", "training/notes.txt", "training/final/a.bin", "training/final/b.bin"):
        (place / name).touch()
    scan, steady, lstat = os.scandir, backup._Writer._steady, Path.lstat

    def allowed(path: Path) -> Path:
        if path == place / shut or (path.parent / "*" == place / shut):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return path

    monkeypatch.setattr(os, "scandir", lambda path: scan(allowed(Path(path))))
    monkeypatch.setattr(backup._Writer, "_steady", lambda self, path: steady(self, allowed(path)))
    monkeypatch.setattr(Path, "lstat", lambda self: lstat(allowed(self) if "*" in shut else self))
    file = tmp_path / "b.zip"
    done = CliRunner().invoke(app, ["backup", str(file), "--home", str(home)], catch_exceptions=False)
    monkeypatch.undo()
    assert done.exit_code == 1
    assert f"this backup is not whole: it lacks {place.name}/{lacks}; make another one, as a user who" in done.output
    members = {
        name.removeprefix(f"{place.name}/") for name in restore_backup(file, settings_of(tmp_path / "n")).members
    }
    wanted = {"report.html", "training/notes.txt", "training/final/a.bin", "training/final/b.bin"}
    assert members & wanted == {name for name in wanted if not name.startswith(lacks)}


def test_a_file_that_is_written_all_the_time_is_named(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.housekeeping import backup

    monkeypatch.setattr(backup, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(backup, "_same", lambda before, after: before.st_size != len(b"never read" * 100))
    made = make_backup(settings_of(original), tmp_path / "b.zip", "1")
    assert [name.rpartition("/")[2] for name in made.left_out] == ["optimizer.pt"]


def test_links_are_not_followed_but_for_artifacts_on_another_disk(original: Path, tmp_path: Path) -> None:
    make_home(tmp_path / "home")
    (tmp_path / "home" / "mlartifacts").rename(tmp_path / "disk")
    (tmp_path / "home" / "mlartifacts").symlink_to(tmp_path / "disk")
    folder = next(p for p in (tmp_path / "home").iterdir() if (p / "report.html").is_file())
    (folder / "secret").symlink_to(original / "keys.txt")
    (folder / "more").symlink_to(original)
    made = make_backup(settings_of(tmp_path / "home"), tmp_path / "b.zip", "1")
    assert sorted(name.split("/")[1] for name in made.left_out) == ["more", "secret"]
    assert (tmp_path / "b.zip").stat().st_mode & 0o077 == 0
    assert not any(KEY.encode() in zipfile.ZipFile(tmp_path / "b.zip").read(n) for n in made.members)
    restore_backup(tmp_path / "b.zip", settings_of(tmp_path / "new"))
    shutil.rmtree(tmp_path / "disk")
    with opened(tmp_path / "new") as home:
        check_files(home.registry, home.newest())


def test_the_commands(original: Path, tmp_path: Path) -> None:
    file, home = str(tmp_path / "b.zip"), str(tmp_path / "new")
    done = CliRunner().invoke(app, ["backup", file, "--home", str(original)], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"trace-agent restore {file} --home FOLDER" in done.output
    done = CliRunner().invoke(app, ["restore", file, "--home", home], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"{home}: 3 rounds" in done.output
    assert str(original) in done.output
