"""A home in one archive: store, registry, artifacts and the folders of its rounds, while a round may be at work.

The order is what makes it consistent. The store is copied first, then the registry, then files: what a row of the
store names was registered before, what the registry calls ready was written before, so the later copy has it. What is
newer than the store's copy is harmless: it is done again, and found by its digest.

Covered: files that are written, renamed or removed meanwhile. Only what is named here is copied (`_folders`), so a
file with a key that somebody put into the home is not; nothing is unpickled. Not covered: PostgreSQL and MLflow
servers, which have their own tools; the folder of converted models; Prefect's database, which is the record of nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from db.copies import copy_sqlite, sqlite_file, sqlite_revision
from db.engine import parse_url, show
from db.schema import VERSION_TABLE
from db.values.types import utc_now
from errors import ConfigurationError, StoreError
from models.adapters.addresses import REVISION_TABLE
from models.adapters.registry import without_password
from settings import Settings
from tasks.housekeeping.manifest import FORMAT, MANIFEST, REGISTRY, STORE, Manifest, Member
from tasks.housekeeping.unfinished import unfinished
from tasks.round.registry import ARTIFACTS

# Folders with copies of what is in the registry.
FILLED_AGAIN = {"served", "adapters"}
_BLOCK = 1 << 20
_IN_MEMORY = 64 << 20  # bytes of a file that is looked at twice
_TRIES, _PAUSE_SECONDS = 5, 0.2
_PART = "archive"  # its name until it is whole


def make_backup(settings: Settings, file: Path, code_version: str) -> Manifest:
    """Write a backup of the settings' home to `file`, which appears whole or not at all. What backups that were killed
    have left beside it is removed first.

    Raises `ConfigurationError` for a home that is not there, is not in SQLite files, or a `file` that exists or lies in
    the home; `StoreError` for a damaged database and a full disk.
    """
    file = file.expanduser().resolve()
    store, registry = home_files(settings)
    if not store.is_file():
        raise ConfigurationError(f"there is no home in {settings.folder}: {store} is missing; give another --home")
    if file.exists():
        raise ConfigurationError(f"{file} exists; give another name, so that an earlier backup is not lost")
    if file.is_relative_to(settings.folder):
        raise ConfigurationError(f"{file} lies in the home, and would be lost with it; give a file elsewhere")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(file.parent, "backup") as scratch:
            part = scratch / _PART
            part.touch(mode=0o600)  # it holds users' conversations
            with ZipFile(part, "w", ZIP_DEFLATED, compresslevel=1) as archive:
                manifest = _write(archive, settings, (store, registry), scratch, code_version)
            with part.open("rb") as written:
                os.fsync(written.fileno())
            part.rename(file)
    except StoreError:
        raise
    except OSError as problem:
        raise StoreError(
            f"the backup {file} cannot be written ({problem.strerror or problem}); free space there or give another "
            "file; nothing was left behind, and the home is as it was"
        ) from problem
    return manifest


def lacking(home: Path, manifest: Manifest) -> list[str]:
    """What a backup left out and the home still has, but for links: the backup is not whole without it. What was
    being removed meanwhile is gone from both."""
    return [name for name in manifest.left_out if _is_there(home / name)]


def _is_there(path: Path) -> bool:
    """Whether something is at a path, and is no link."""
    try:
        return (mode := _mode(path)) != 0 and not stat.S_ISLNK(mode)
    except PermissionError:  # it lies in a folder that this user may not enter
        return True


def home_files(settings: Settings) -> tuple[Path, Path]:
    """The SQLite files of store and registry. Raises `ConfigurationError` where either is kept by a server."""
    url = parse_url(settings.database_url)
    if settings.files:
        raise ConfigurationError(
            f"this home puts its files in {settings.files!r}: only homes with all files in their folder are backed up "
            "and restored by this command, and an archive would lack what other homes put there; copy the database "
            "first and the storage after it, each by its own means (docs/10-scale.md)"
        )
    store = sqlite_file(settings.database_url)
    if store is None:
        raise ConfigurationError(
            f"the store is {show(url)!r}: only homes in SQLite files are backed up and restored by this command; use "
            "pg_dump and pg_restore for the database, and copy runs and artifacts after it (docs/1-running.md)"
        )
    registry = sqlite_file(settings.tracking_uri) if settings.tracking_uri.startswith("sqlite:") else None
    if registry is None:
        raise ConfigurationError(
            f"the registry is {without_password(settings.tracking_uri)!r}: only homes in SQLite files are backed up "
            "and restored by this command; back up the server's database and artifacts with its own tools "
            "(docs/1-running.md)"
        )
    return store, registry


@dataclass
class _Writer:
    """Members of an archive, with their digests as they are written."""

    archive: ZipFile
    scratch: Path
    members: dict[str, Member] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, source: IO[bytes]) -> None:
        """Write what `source` still has as the member `name`."""
        digest, size = hashlib.sha256(), 0
        entry = ZipInfo(name)
        entry.compress_type = ZIP_DEFLATED
        with self.archive.open(entry, "w", force_zip64=True) as into:
            while block := source.read(_BLOCK):
                digest.update(block)
                size += len(block)
                into.write(block)
        self.members[name] = Member(size=size, sha256=digest.hexdigest())

    def add_folder(self, folder: Path, home: Path) -> None:
        """Write the files below a folder. One within it that loses a file meanwhile is being removed, and is left out:
        a checkpoint that says it is complete and is not could not be resumed from. So is one with a file that this user
        may not read. What lies in `folder` itself is whole file by file."""
        gone: set[str] = set()
        for path in _files(folder, lambda closed: self.left_out.append(closed.relative_to(home).as_posix())):
            name, parent = path.relative_to(home).as_posix(), path.parent.relative_to(home).as_posix()
            if parent in gone:
                continue
            if path.is_symlink():
                self.left_out.append(name)
                continue
            try:
                source = self._steady(path)
            except (FileNotFoundError, PermissionError) as problem:
                if path.parent != folder:
                    gone.add(parent)
                elif isinstance(problem, PermissionError):
                    self.left_out.append(name)
                continue
            if source is None:
                self.left_out.append(name)
                continue
            with source:
                self.add(name, source)
        for parent in gone:
            # The directory's archive entries stay in the file; only what the manifest names is ever put back.
            self.members = {n: m for n, m in self.members.items() if not n.startswith(f"{parent}/")}
            self.left_out.append(parent)

    def _steady(self, path: Path) -> IO[bytes] | None:
        """The content of a file as nobody was writing it; None for one that is written all the time."""
        for attempt in range(_TRIES):
            time.sleep(_PAUSE_SECONDS if attempt else 0)
            before = path.stat()
            kept: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(self.scratch))  # noqa: SIM115 (the caller's)
            try:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, kept, _BLOCK)
                after = path.stat()
            except BaseException:
                kept.close()
                raise
            if _same(before, after):
                kept.seek(0)
                return kept
            kept.close()
        return None


def _same(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns)


def _write(
    archive: ZipFile, settings: Settings, files: tuple[Path, Path], scratch: Path, code_version: str
) -> Manifest:
    store, registry = files
    writer = _Writer(archive, scratch)
    copies = {STORE: store} | ({REGISTRY: registry} if registry.is_file() else {})
    for name, source in copies.items():
        copy_sqlite(source, scratch / name)
    revision = sqlite_revision(scratch / STORE, VERSION_TABLE)
    if not revision:
        raise StoreError(f"{store} is not the database of a home (no table {VERSION_TABLE}); give another --home")
    rounds = _round_ids(scratch / STORE)
    for name in copies:
        with (scratch / name).open("rb") as copy:
            writer.add(name, copy)
    for folder in _folders(settings.folder, rounds):
        writer.add_folder(folder, settings.folder)
    manifest = Manifest(
        format=FORMAT,
        code_version=code_version,
        revision=revision,
        registry_revision=sqlite_revision(scratch / REGISTRY, REVISION_TABLE) if REGISTRY in copies else "",
        home=str(settings.folder),
        made_at=utc_now(),
        rounds=len(rounds),
        members=writer.members,
        left_out=writer.left_out,
        not_copied=_others(settings.folder, {ARTIFACTS, *rounds}, files),
    )
    archive.writestr(MANIFEST, manifest.model_dump_json(indent=1))
    return manifest


def _others(home: Path, copied: set[str], files: tuple[Path, Path]) -> list[str]:
    """Names in the home that are not copied, so that nobody relies on a backup for them."""
    beside = {f"{file.name}{end}" for file in files for end in ("", "-wal", "-shm", "-journal")}
    return sorted(e.name for e in home.iterdir() if e.name not in copied | beside | FILLED_AGAIN)


def _round_ids(store: Path) -> list[str]:
    with closing(sqlite3.connect(store)) as opened:
        return [str(found) for (found,) in opened.execute("SELECT id FROM rounds ORDER BY number")]


def _folders(home: Path, rounds: list[str]) -> Iterator[Path]:
    """What belongs to a home besides its databases."""
    for name in (ARTIFACTS, *rounds):
        if (home / name).is_dir():  # or a link to one: artifacts may lie on another disk
            yield home / name


def _files(folder: Path, closed: Callable[[Path], object]) -> Iterator[Path]:
    """Plain files and links below a folder, without following the links, which may lead out of the home. Hidden names
    are parts that are still written: they are renamed when they are whole. `closed` is told of each folder that is
    there and cannot be looked into."""

    def failed(problem: OSError) -> None:
        if not isinstance(problem, FileNotFoundError):  # that one was removed meanwhile
            closed(Path(problem.filename))

    for place, folders, names in os.walk(folder, onerror=failed):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for path in (Path(place, name) for name in sorted([*folders, *names])):
            try:
                mode = _mode(path)
            except PermissionError:  # the folder's names may be read, and nothing in it
                closed(Path(place))
                folders.clear()
                break
            if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and not path.name.startswith(".")):
                yield path


def _mode(path: Path) -> int:
    """The mode of what is at a path, of a link its own; 0 where nothing is. Raises `PermissionError` where this user
    may not know: `Path.is_file` would call that nothing."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
