"""A home put back from a backup, in any folder of any machine.

Everything is made and checked beside the folder first, which then appears by one rename: a restore that fails leaves
nothing, and what one that was killed has left goes with the next one there. Absolute addresses (MLflow's of its
artifacts, and a store's of report pages, of earlier versions) are changed to the new folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from db.copies import sqlite_file, sqlite_revision
from db.schema import VERSION_TABLE
from errors import ConfigurationError, StoreError, TraceError
from models.adapters.addresses import move_addresses
from settings import Settings
from tasks.housekeeping.manifest import MANIFEST, REGISTRY, STORE, Manifest, Member, read_manifest
from tasks.housekeeping.unfinished import unfinished
from tasks.round.registry import ARTIFACTS

_BLOCK = 1 << 20
# Left free on the disk: what the first commands in the new home write.
_SPARE_BYTES = 64 << 20
_MOST_MANIFEST = 256 << 20


def restore_backup(file: Path, settings: Settings) -> Manifest:
    """Put a backup into the settings' home, a folder that is empty or not there.

    Raises `ConfigurationError` for a folder that holds something or is a mount point, or settings that put store,
    registry or files elsewhere; `StoreError` for a file that is cut short, changed, of another format or newer schema,
    and for a full disk.
    """
    file, home = file.expanduser().resolve(), settings.folder
    _check_destination(settings)
    with _reading(file) as archive:
        manifest = _manifest(archive, file)
        _check_space(manifest, home)
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            with unfinished(home.parent, "restore") as scratch:
                made = scratch / "home"
                made.mkdir()
                for name, member in manifest.members.items():
                    _put(archive, name, member, made / name)
                _check_made(made, manifest, file)
                _move_in(made, home, manifest)
                made.rename(home)  # takes the place of an empty folder, and of no other
        except StoreError:
            raise
        except OSError as problem:
            if problem.errno == errno.EBUSY:  # a mount of its own parent's disk looks like any folder until then
                raise ConfigurationError(_mounted(home)) from problem
            raise StoreError(
                f"{file} cannot be restored to {home} ({problem.strerror or problem}); free space there or give "
                "another --home; nothing was left behind"
            ) from problem
    return manifest


def _check_destination(settings: Settings) -> None:
    home = settings.folder
    if settings.files:
        raise ConfigurationError(
            f"a restore makes a home with all files in its folder, but TRACE_FILES names {settings.files!r}, where "
            "other homes would look for them; leave it unset, here and in trace.toml, and restore again "
            "(docs/10-scale.md)"
        )
    for name, value, place in (
        ("TRACE_DATABASE", settings.database, home / STORE),
        ("TRACE_TRACKING", settings.tracking, home / REGISTRY),
    ):
        if value and not (value.startswith("sqlite:") and sqlite_file(value) == place):
            raise ConfigurationError(
                f"a restore makes {place}, but {name} names another database, which would be used instead; leave "
                f"it unset, here and in trace.toml, and restore again"
            )
    if os.path.ismount(home):
        raise ConfigurationError(_mounted(home))
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise ConfigurationError(
            f"{home} is not empty; nothing is restored over what is there: give an empty folder with --home, or move "
            "that one away"
        )


def _mounted(home: Path) -> str:
    return (
        f"{home} is a mount point (of a disk or a volume), and a home appears by one rename, which no mount point can "
        f"take: restore to a folder in it, with --home {home / 'home'}, and give that one from then on (TRACE_HOME); "
        "nothing was restored"
    )


@contextmanager
def _reading(file: Path) -> Iterator[ZipFile]:
    """The archive; what the zip format finds wrong with it is one `StoreError`."""
    if not file.is_file():
        raise ConfigurationError(f"there is no backup {file}; give the file that 'trace-agent backup' wrote")
    try:
        with ZipFile(file) as archive:
            yield archive
    except TraceError:
        raise
    except (BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as problem:
        raise StoreError(
            f"{file} is not a backup, or was cut short or changed ({problem}); take another copy of it; nothing was "
            "restored"
        ) from problem


def _manifest(archive: ZipFile, file: Path) -> Manifest:
    try:
        entry = archive.getinfo(MANIFEST)
    except KeyError:
        raise StoreError(f"{file} has no {MANIFEST}: it is not a backup of this project; give another file") from None
    if entry.file_size > _MOST_MANIFEST:
        raise StoreError(f"{file} has a manifest of {entry.file_size} bytes: it is not a backup of this project")
    return read_manifest(archive.read(entry), file)


def _check_space(manifest: Manifest, home: Path) -> None:
    place = next(p for p in (home, *home.parents) if p.exists())
    free, needed = shutil.disk_usage(place).free, manifest.bytes + _SPARE_BYTES
    if free < needed:
        raise StoreError(
            f"{place} has {free / 1e9:.2f} GB free, and the backup needs {needed / 1e9:.2f}; free space there or give "
            "another --home; nothing was restored"
        )


def _put(archive: ZipFile, name: str, member: Member, path: Path) -> None:
    """Write one member, whose bytes must be those of the manifest; no more of them are read than it says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    try:
        source = archive.open(name)
    except KeyError:
        raise StoreError(f"{archive.filename} lacks {name}; take another copy of the backup") from None
    with source, path.open("xb") as into:
        while size <= member.size and (block := source.read(_BLOCK)):
            digest.update(block)
            size += len(block)
            into.write(block)
    if (size, digest.hexdigest()) != (member.size, member.sha256):
        raise StoreError(
            f"{archive.filename}: {name} has SHA-256 {digest.hexdigest()[:16]}..., the manifest "
            f"{member.sha256[:16]}...; the file was changed: take another copy of the backup; nothing was restored"
        )


def _check_made(made: Path, manifest: Manifest, file: Path) -> None:
    found = sqlite_revision(made / STORE, VERSION_TABLE)
    if found != manifest.revision:
        raise StoreError(
            f"{file}: the database has schema {found!r}, the manifest says {manifest.revision!r}; do not use this file"
        )


def _move_in(made: Path, home: Path, manifest: Manifest) -> None:
    """Make what lies in `made` a home that lies in `home`."""
    if REGISTRY in manifest.members:
        move_addresses(made / REGISTRY, home / ARTIFACTS)
    try:
        with closing(sqlite3.connect(made / STORE)) as opened, opened:
            _move_pages(opened, manifest.home, str(home))
    except sqlite3.Error as problem:
        raise StoreError(f"the store of the backup cannot be changed ({problem}); take another copy of it") from problem
    for file in (made / STORE, made / REGISTRY):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())


def _move_pages(opened: sqlite3.Connection, old: str, new: str) -> None:
    """Rounds of earlier versions say where their page is; everything else in the store is relative to the home."""
    found = opened.execute("SELECT id, result FROM stages WHERE result IS NOT NULL").fetchall()
    for key, text in found:
        before = json.loads(text)
        after = _moved(before, old, new)
        if after != before:
            opened.execute("UPDATE stages SET result = ? WHERE id = ?", (json.dumps(after), key))


def _moved(value: Any, old: str, new: str) -> Any:
    """A JSON value with the paths in `old` as paths in `new`."""
    if isinstance(value, dict):
        return {name: _moved(part, old, new) for name, part in value.items()}
    if isinstance(value, list):
        return [_moved(part, old, new) for part in value]
    if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
        return new + value[len(old) :]
    return value
