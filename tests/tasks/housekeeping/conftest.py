"""A home that the tests of backups only read, and its backup."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.housekeeping.backup import make_backup
from tests.tasks.housekeeping.kept_homes import KEY, make_home, settings_of


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that every test here only reads; with what does not belong into a backup."""
    folder = tmp_path_factory.mktemp("first") / "a home with spaces"
    make_home(folder)
    (folder / ".env").write_text(KEY)
    (folder / "keys.txt").write_text(KEY)
    (folder / "served").mkdir()
    (folder / "served" / "copy").write_text(KEY)
    return folder


@pytest.fixture(scope="module")
def archive(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("archive") / "home.zip"
    make_backup(settings_of(original), file, "0.1.0+abc")
    return file
