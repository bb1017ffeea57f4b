"""Backups and restores whose process is killed half-way: nothing looks whole, and the next one removes what is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from db import open_store
from tasks.housekeeping import backup, restore
from tasks.housekeeping.unfinished import unfinished
from tests.tasks.housekeeping.kept_homes import settings_of


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home without a registry, which takes half a minute to make."""
    folder = tmp_path_factory.mktemp("made") / "home"
    with open_store(settings_of(folder).database_url) as store:
        place = folder / store.start_round("shop", "data", 1, "laptop", {}).id
    place.mkdir()
    (place / "report.html").touch()
    return folder


def killed(work: Callable[[], object]) -> None:
    """Do `work` in a process that is killed in the middle of it, by itself."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_a_killed_backup_left_goes_with_the_next_one(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(backup, "Manifest", die)  # all is copied, and nothing says what
        killed(lambda: backup.make_backup(settings_of(original), tmp_path / "monday.zip", "1"))
    (left,) = names(tmp_path)
    assert left.startswith(".backup-")
    assert {"archive", "trace.db"} <= names(tmp_path / left)
    mine = tmp_path / ".backup-of-my-own"
    mine.mkdir()
    (mine / "lock").touch()
    backup.make_backup(settings_of(original), tmp_path / "tuesday.zip", "1")
    assert names(tmp_path) == {"tuesday.zip", mine.name}
    assert names(mine) == {"lock"}


def test_what_a_killed_restore_left_goes_with_the_next_one(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "monday.zip"
    backup.make_backup(settings_of(original), archive, "1")
    with monkeypatch.context() as patched:
        patched.setattr(restore, "_move_in", die)
        killed(lambda: restore.restore_backup(archive, settings_of(tmp_path / "home")))
    (left,) = names(tmp_path) - {archive.name}
    assert (tmp_path / left / "home" / "trace.db").is_file()
    restore.restore_backup(archive, settings_of(tmp_path / "home"))
    assert names(tmp_path) == {"home", archive.name}


def test_a_living_backup_is_let_alone(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backup into the same folder begins and ends while one is in its middle."""
    middle, go_on = threading.Event(), threading.Event()
    made = backup.Manifest

    def waiting(**given: Any) -> backup.Manifest:
        if threading.current_thread() is slow:
            middle.set()
            assert go_on.wait(10)
        return made(**given)

    monkeypatch.setattr(backup, "Manifest", waiting)
    work = {"target": backup.make_backup, "args": (settings_of(original), tmp_path / "slow.zip", "1")}
    slow = threading.Thread(**work)  # type: ignore[arg-type]
    slow.start()
    assert middle.wait(10)
    backup.make_backup(settings_of(original), tmp_path / "quick.zip", "1")
    go_on.set()
    slow.join()
    assert names(tmp_path) == {"slow.zip", "quick.zip"}


def test_a_death_while_a_dead_ones_files_are_removed_leaves_them_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> None:
        with unfinished(tmp_path, "backup") as folder:
            (folder / "made").mkdir()
            (folder / "made" / "big").touch()
            die()

    killed(begin)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", die)
        killed(begin)
    with unfinished(tmp_path, "backup") as folder:
        assert names(tmp_path) == {folder.name}
        assert folder.stat().st_mode & 0o077 == 0
    assert names(tmp_path) == set()
