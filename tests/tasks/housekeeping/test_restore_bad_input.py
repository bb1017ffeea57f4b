"""What cannot be backed up or restored is one clear error, and leaves nothing behind."""

from __future__ import annotations

import errno
import hashlib
import json
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from db import open_store
from db.schema import HEAD
from errors import ConfigurationError, StoreError
from tasks.housekeeping.backup import make_backup
from tasks.housekeeping.manifest import MANIFEST
from tasks.housekeeping.restore import restore_backup
from tests.tasks.housekeeping.kept_homes import settings_of


def changed(archive: Path, destination: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> Path:
    """A copy of an archive whose manifest or members were changed."""
    with zipfile.ZipFile(archive) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members.pop(MANIFEST))
    change(manifest, members)
    with zipfile.ZipFile(destination, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
        file.writestr(MANIFEST, json.dumps(manifest))
    return destination


def outside(name: str) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    def change(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        members[name] = b"planted"
        manifest["members"][name] = {"size": 7, "sha256": hashlib.sha256(b"planted").hexdigest()}

    return change


def first_artifact(members: dict[str, bytes]) -> str:
    return next(name for name in members if name.endswith(".safetensors"))


BAD: list[tuple[Callable[[dict[str, Any], dict[str, bytes]], None], str]] = [
    (lambda m, _: m.update(format=2, code_version="9.0"), "has format 2, this version reads 1.*9.0"),
    (lambda m, _: m.update(revision="0999"), f"schema '0999', this version knows up to '{HEAD}'"),
    (lambda m, _: m.update(registry_revision="ffffffffffff"), "registry of schema 'ffffffffffff'"),
    (lambda m, _: m.update(surprise=1), "manifest surprise"),
    (lambda m, _: m["members"].pop("trace.db"), "holds no trace.db"),
    (lambda m, _: m.update(revision="0002"), f"schema '{HEAD}', the manifest says '0002'"),
    (lambda _, d: d.pop(first_artifact(d)), "lacks .*safetensors"),
    (lambda _, d: d.update({first_artifact(d): b"other bytes"}), "has SHA-256 .* the file was changed"),
    (lambda _, d: d.update({first_artifact(d): b"\0" * 50_000_000}), "has SHA-256 .* the file was changed"),
    (outside("../planted"), r"member '\.\./planted', which lies outside"),
    (outside("/tmp/planted-by-a-backup"), "lies outside a home"),
    (outside("mlartifacts/../../planted"), "lies outside a home"),
    (outside("a\\..\\planted"), "lies outside a home"),
]


@pytest.mark.parametrize(("change", "said"), BAD, ids=[said[:30] for _, said in BAD])
def test_a_bad_archive_is_refused_and_leaves_nothing(archive: Path, tmp_path: Path, change: Any, said: str) -> None:
    file = changed(archive, tmp_path / "bad.zip", change)
    with pytest.raises(StoreError, match=said):
        restore_backup(file, settings_of(tmp_path / "place" / "home"))
    left = [p for p in tmp_path.rglob("*") if p not in (file, tmp_path / "place")]
    assert left == []
    assert not Path("/tmp/planted-by-a-backup").exists()


def test_a_mount_point_is_refused_before_anything_is_unpacked(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "volume"
    home.mkdir()
    said = f"{home} is a mount point .* restore to a folder in it, with --home {home}/home"
    with monkeypatch.context() as patched:
        patched.setattr("os.path.ismount", lambda path: Path(path) == home)
        patched.setattr("tasks.housekeeping.restore._reading", lambda *given: pytest.fail("nothing is read"))
        with pytest.raises(ConfigurationError, match=said):
            restore_backup(archive, settings_of(home))

    def busy(*given: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)  # one that looks like any folder
    with pytest.raises(ConfigurationError, match=said):
        restore_backup(archive, settings_of(home))
    assert list(tmp_path.iterdir()) == [home]
    assert list(home.iterdir()) == []


def test_an_archive_that_was_cut_short_or_is_another_file(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    for name, content in {
        "half": whole[: len(whole) // 2],
        "almost": whole[:-30],
        "text": b"hello",
        "empty": b"",
    }.items():
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(StoreError, match="not a backup, or was cut short"):
            restore_backup(file, settings_of(tmp_path / "home"))
    # One byte of a compressed member, the directory at the end being whole.
    with zipfile.ZipFile(archive) as file_:
        entry = file_.getinfo("trace.db")
    at = entry.header_offset + 200
    (tmp_path / "bit").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    with pytest.raises(StoreError, match=r"cut short or changed|the file was changed"):
        restore_backup(tmp_path / "bit", settings_of(tmp_path / "home"))
    with zipfile.ZipFile(tmp_path / "zip", "w") as other:
        other.writestr("x", "y")
    with pytest.raises(StoreError, match="not a backup of this project"):
        restore_backup(tmp_path / "zip", settings_of(tmp_path / "home"))
    with pytest.raises(ConfigurationError, match="there is no backup"):
        restore_backup(tmp_path / "none.zip", settings_of(tmp_path / "home"))
    assert not (tmp_path / "home").exists()


def test_a_place_below_a_file_is_no_place_for_a_backup(archive: Path, original: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be written .*; free space there or give another file"):
        make_backup(settings_of(original), archive / "b.zip", "1")


def test_where_it_goes_and_comes_from(archive: Path, original: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("kept")
    with pytest.raises(ConfigurationError, match="is not empty"):
        restore_backup(archive, settings_of(full))
    assert [p.name for p in full.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    assert restore_backup(archive, settings_of(tmp_path / "empty")).rounds == 3
    for given in ({"database": "postgresql://u:secret@h/d"}, {"database": f"sqlite:///{tmp_path}/other.db"}):
        with pytest.raises(ConfigurationError, match="TRACE_DATABASE names another database") as refused:
            restore_backup(archive, settings_of(tmp_path / "n", **given))
        assert "secret" not in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"TRACE_FILES names 's3://trace/shop'.* leave it unset"):
        restore_backup(archive, settings_of(tmp_path / "n", files="s3://trace/shop"))
    for given, said in (
        ({"database": "postgresql://u:secret@h/d"}, "use pg_dump"),
        ({"tracking": "http://u:secret@h:5000"}, "the registry is 'http://h:5000'"),
    ):
        with pytest.raises(ConfigurationError, match=said) as refused:
            make_backup(settings_of(original, **given), tmp_path / "b.zip", "1")
        assert "secret" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="there is no home in"):
        make_backup(settings_of(tmp_path / "nowhere"), tmp_path / "b.zip", "1")
    with pytest.raises(ConfigurationError, match="lies in the home"):
        make_backup(settings_of(original), original / "b.zip", "1")
    before = archive.read_bytes()
    with pytest.raises(ConfigurationError, match="exists; give another name"):
        make_backup(settings_of(original), archive, "1")
    assert archive.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """No file may grow beyond `most` bytes: what a full disk does to who writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up(archive: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_files(100_000), pytest.raises(StoreError, match="free space"):
        restore_backup(archive, settings_of(tmp_path / "home"))
    with small_files(100_000), pytest.raises(StoreError, match="free space"):
        make_backup(settings_of(original), tmp_path / "b.zip", "1")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(StoreError, match=r"has 0.00 GB free, and the backup needs 0\.0"):
        restore_backup(archive, settings_of(tmp_path / "home"))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_database_is_not_backed_up(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "home")
    file = tmp_path / "home" / "trace.db"
    with open_store(f"sqlite:///{file}"):
        pass
    content = bytearray(file.read_bytes())
    content[4096 * 3 : 4096 * 40] = b"\xff" * (4096 * 37)
    file.write_bytes(bytes(content))
    with pytest.raises(StoreError, match=r"trace\.db"):
        make_backup(settings_of(tmp_path / "home"), tmp_path / "b.zip", "1")
    assert not (tmp_path / "b.zip").exists()
