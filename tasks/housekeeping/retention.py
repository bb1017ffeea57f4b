"""What of a home may be removed: files by which a finished round was made, and copies that are fetched again.

Never touched, whatever its age: rounds that can be gone on with, reports, figures, routers, environments, both
databases (labels and trajectories are there), MLflow's artifacts, and the adapters of every release, as trained and as
served. What goes is a training's checkpoints and step weights (most of a home), the trained copy of an adapter that
no release has and MLflow holds, and copies in `adapters` and `served` that belong to no release. The same goes from the
storage of a home that has one (`files`), by the same rule; all that is there is listed before anything is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from db import AdapterRow, ReleaseRow, Round, Store, open_store
from db.copies import sqlite_file
from db.values.states import is_final
from db.values.types import utc_now
from errors import ConfigurationError, StoreError
from models.objects import HomeFiles, files_of
from settings import Settings
from tasks.releases.lookup import version_name

TRAINING, FINAL = "training", "final"
COPIES = ("adapters", "served")


@dataclass(frozen=True)
class Removal:
    """A file or folder that nothing needs: its size in bytes, since when it is done with, and what it is. With `stored`
    it is what the storage holds under that path of the home, not the home's own."""

    path: Path
    bytes: int
    since: datetime
    what: str
    stored: HomeFiles | None = None

    @property
    def relative(self) -> str:
        """The path in the storage."""
        assert self.stored is not None, "only what is stored has one"
        return self.path.relative_to(self.stored.home).as_posix()

    @property
    def place(self) -> str:
        """Where it lies, for people."""
        return f"{self.stored.address}/{self.relative}" if self.stored else str(self.path)


def removals(settings: Settings, days: int, keep_gb: float | None = None) -> list[Removal]:
    """What is older than `days` and not needed, oldest first; with `keep_gb` only so much of it that the home takes
    that many GB (10^9 bytes), and nothing of its storage, which is no part of that. Raises `ConfigurationError` for a
    folder that is no home, `StoreError` for a storage that does not answer."""
    file = sqlite_file(settings.database_url)
    stored = files_of(settings)
    if not settings.folder.is_dir() or (file is not None and not file.is_file()):
        raise ConfigurationError(f"there is no home in {settings.folder}; give another --home")
    with open_store(settings.database_url) as store:
        found = [*_of_rounds(settings.folder, store), *_copies(settings.folder, store)]
        if stored.address and keep_gb is None:
            stored.check()
            found += _of_storage(stored, store)
    before = utc_now() - timedelta(days=days)
    old = sorted((r for r in found if r.since < before), key=lambda r: (r.since, str(r.path)))
    if keep_gb is None:
        return old
    chosen, excess = [], _size(settings.folder) - keep_gb * 1e9
    for removal in old:
        if excess <= 0:
            break
        chosen.append(removal)
        excess -= removal.bytes
    return chosen


def remove(chosen: list[Removal]) -> int:
    """Remove these; the bytes that were freed. Raises `StoreError` where one cannot be removed."""
    freed = 0
    for removal in chosen:
        try:
            if removal.stored:
                removal.stored.remove(removal.relative)
            elif removal.path.is_dir():
                shutil.rmtree(removal.path)
            else:
                removal.path.unlink()
        except OSError as problem:
            raise StoreError(
                f"{removal.path} cannot be removed ({problem.strerror or problem}), after {freed / 1e9:.2f} GB were "
                "freed; make it writable, then run the command again"
            ) from problem
        freed += removal.bytes
    return freed


def _kept(store: Store) -> tuple[dict[Path, AdapterRow], set[Path]]:
    """Adapters by their path in the home, and the paths that have to stay."""
    needed = {member["adapter_id"] for row in store.rows(ReleaseRow) for member in row.members.values()}
    adapters = {Path(a.path): a for a in store.rows(AdapterRow) if a.path}
    # An adapter that is not registered has its only copy here.
    return adapters, {path for path, a in adapters.items() if a.id in needed or not a.registered_version}


def _of_rounds(home: Path, store: Store) -> Iterator[Removal]:
    """Parts of the trainings of rounds that have ended for good."""
    adapters, kept = _kept(store)
    for row in store.rows(Round):
        if not is_final(row.state):
            continue
        for training in _entries(home / row.id / TRAINING):
            for part in _entries(training):
                place = part.relative_to(home)
                if any(path.is_relative_to(place) for path in kept) or (part.name == FINAL and place not in adapters):
                    continue
                yield Removal(part, _size(part), row.finished_at or row.started_at, _told(row, place in adapters))


def _of_storage(stored: HomeFiles, store: Store) -> Iterator[Removal]:
    """The same in the storage: what was put as a training has its checkpoints and step weights, and no adapter."""
    adapters, kept = _kept(store)
    for row in store.rows(Round):
        if not is_final(row.state):
            continue
        base = Path(row.id) / TRAINING
        for name in stored.held(str(base))[1]:
            sizes, folders = stored.held(str(base / name))
            parts = {base / name: sizes}
            for folder in folders:
                place = base / name / folder
                if place in adapters and place not in kept:
                    parts[place] = stored.held(str(place))[0]
            for place, found in parts.items():
                if found:
                    path, since = stored.home / place, row.finished_at or row.started_at
                    yield Removal(path, sum(found.values()), since, _told(row, place in adapters), stored)


def _told(row: Round, adapter: bool) -> str:
    what = "trained copy of an adapter in no release" if adapter else "checkpoints and weights"
    return f"round {row.number}: {what}"


def _copies(home: Path, store: Store) -> Iterator[Removal]:
    """Adapters that were fetched from MLflow and belong to no release; a server may still have to read the others."""
    needed = {version_name(c, m) for row in store.rows(ReleaseRow) for c, m in row.members.items()}
    for name in COPIES:
        for part in _entries(home / name):
            if part.name not in needed:
                since = datetime.fromtimestamp(part.lstat().st_mtime, UTC)
                yield Removal(part, _size(part), since, "fetched copy of an adapter in no release")


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder of the home. A link leads elsewhere and is left alone."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if not entry.is_symlink())


def _size(path: Path) -> int:
    """Bytes of a file, or of all plain files below a folder."""
    if not path.is_dir():
        return path.lstat().st_size
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            try:
                total += Path(place, name).lstat().st_size
            except FileNotFoundError:
                continue  # removed meanwhile
    return total
