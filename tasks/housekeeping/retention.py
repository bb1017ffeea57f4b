"""What of a home may be removed: files by which a finished round was made, and copies that are fetched again.

Never touched, whatever its age: rounds that can be resumed (those that later ones have left behind are closed by
`give_up`, and then as others), reports, figures, routers, environments, both databases (labels and trajectories are
there; users' conversations go where `forget` is asked for it), MLflow's artifacts, and the adapters of every release,
as trained and as served. What goes is a training's checkpoints and step weights (most of a home), the trained copy of
an adapter that no release has and MLflow holds, and copies in `adapters` and `served` that belong to no release.

With `files` the same goes from the storage, whichever home put it there. What another home put is found by listing the
storage, so nothing is chosen while it cannot be reached.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from db import AdapterRow, ReleaseRow, Round, RoundState, Store, open_store
from db.copies import sqlite_file
from db.values.states import is_final
from db.values.types import utc_now
from errors import ConfigurationError, StoreError
from models.adapters.files import round_name
from models.objects import HomeFiles, files_of
from settings import Settings
from tasks.releases.lookup import version_name
from tasks.unattended.left_behind import left_behind
from tasks.unattended.sizes import size_of
from tasks.unattended.stalls import pulse

TRAINING, FINAL = "training", "final"
COPIES = ("adapters", "served")


@dataclass(frozen=True)
class Removal:
    """A file or folder that nothing needs: its size in bytes, since when it is done with, and what it is. `objects` are
    those of the storage, below the address `place`; without any it is the `place` in the home."""

    place: str
    bytes: int
    since: datetime
    what: str
    objects: tuple[str, ...] = ()


def removals(settings: Settings, days: int, keep_gb: float | None = None) -> list[Removal]:
    """What is older than `days` and not needed, oldest first; with `keep_gb` only so much of it that the home takes
    that many GB (10^9 bytes); what lies in the storage does not count, and goes along with what is as old. Raises
    `ConfigurationError` for a folder that is no home, and where the storage may not be used; `StoreError` while the
    storage does not answer."""
    _check_home(settings)
    files = files_of(settings)
    files.check()
    with open_store(settings.database_url) as store:
        found = [*_of_rounds(settings.folder, files, store), *_copies(settings.folder, store)]
    before = utc_now() - timedelta(days=days)
    old = sorted((r for r in found if r.since < before), key=lambda r: (r.since, not r.objects, r.place))
    if keep_gb is None:
        return old
    chosen, excess = [], size_of(settings.folder) - keep_gb * 1e9
    for removal in old:
        if excess <= 0:
            break
        chosen.append(removal)
        excess -= 0 if removal.objects else removal.bytes
    return chosen


def remove(settings: Settings, chosen: list[Removal]) -> int:
    """Remove these, those of the storage first; the bytes that were freed. Raises `StoreError` where one cannot be
    removed: as long as it is the storage that fails, nothing of the home is gone."""
    freed, files = 0, files_of(settings)
    for removal in sorted(chosen, key=lambda r: not r.objects):
        if removal.objects:
            files.remove(removal.objects)
        else:
            _remove(Path(removal.place), freed)
        pulse()
        freed += removal.bytes
    return freed


def removal_text(settings: Settings, count: int, freed: int, dry_run: bool) -> str:
    """What was removed, or would be, and how much is there; and what to do for more of it to go."""
    there, gb = f"{settings.folder} takes {size_of(settings.folder) / 1e9:.3f} GB", f"{freed / 1e9:.3f} GB"
    if not count:
        return (
            f"nothing to remove: {there}, and all of it is needed, younger than --older-than, or within --keep; a "
            "smaller --older-than or --keep takes more"
        )
    what = f"{count} {'entry' if count == 1 else 'entries'}"
    if dry_run:
        return f"{what}, {gb} would be freed; {there}; the same command without --dry-run removes them"
    return f"{what} removed, {gb} freed; {there} now"


def give_up(settings: Settings, days: int, dry_run: bool) -> list[str]:
    """Close rounds that later ones have left behind, and at which nobody was at work for so many days; a line for each
    that was closed, or would be. What they have made goes as of other rounds, so many days after this. Raises
    `ConfigurationError` for a folder that is no home."""
    _check_home(settings)
    before, lines = utc_now() - timedelta(days=days), []
    with open_store(settings.database_url) as store:
        for one in left_behind(store):
            if one.since >= before:
                continue
            if not dry_run:
                reason = f"given up: it was stopped at {one.since:%Y-%m-%d}, and round {one.followed_by} ended since"
                store.finish_round(one.round.id, RoundState.CANCELLED, reason)
            lines.append(f"{one.text()}: it {'would be' if dry_run else 'is'} given up")
    return lines


def forget(settings: Settings, days: int, dry_run: bool) -> tuple[int, int]:
    """Remove users' conversations that are older than `days`; how many were removed, or would be, and of how many
    success and reward are kept. The watch compares what was said of releases for as long as they live, so that is
    kept, without a word of the conversation. Raises `ConfigurationError` for a folder that is no home."""
    _check_home(settings)
    with open_store(settings.database_url) as store:
        return store.forget_conversations(utc_now() - timedelta(days=days), dry_run)


def forgotten_text(days: int, found: tuple[int, int], dry_run: bool) -> str:
    """What `forget` has found, in words."""
    gone, bare = found
    done = "would be removed" if dry_run else "removed"
    kept = "would keep" if dry_run else "kept"
    return f"conversations of more than {days} days ago: {gone} {done}; {bare} {kept} success and reward alone"


def _check_home(settings: Settings) -> None:
    """To open a store that is not there would make it."""
    file = sqlite_file(settings.database_url)
    if not settings.folder.is_dir() or (file is not None and not file.is_file()):
        raise ConfigurationError(f"there is no home in {settings.folder}; give another --home")


def _remove(path: Path, freed: int) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as problem:
        if isinstance(problem, FileNotFoundError) and not path.exists():
            return  # another process has renamed or removed it meanwhile
        raise StoreError(
            f"{path} cannot be removed ({problem.strerror or problem}), after {freed / 1e9:.2f} GB were freed; make it "
            "writable, then run the command again"
        ) from problem


def _of_rounds(home: Path, files: HomeFiles, store: Store) -> Iterator[Removal]:
    """Parts of the trainings of rounds that have ended for good, in the storage and in the home."""
    needed = {member["adapter_id"] for row in store.rows(ReleaseRow) for member in row.members.values()}
    adapters = {Path(a.path): a for a in store.rows(AdapterRow) if a.path}
    # An adapter that is not registered has its only copy here.
    kept = {path for path, a in adapters.items() if a.id in needed or not a.registered_version}
    for row in store.rows(Round):
        if not is_final(row.state):
            continue
        since = row.finished_at or row.started_at
        for place, objects in _stored(files, f"{row.id}/{TRAINING}").items():
            if place in kept or (place.name == FINAL and place not in adapters):
                continue
            what = f"round {row.number}, in the storage: {_what(place in adapters)}"
            yield Removal(f"{files.address}/{place}", sum(objects.values()), since, what, tuple(objects))
        for training in _entries(home / row.id / TRAINING):
            for part in _entries(training):
                place = part.relative_to(home)
                if any(path.is_relative_to(place) for path in kept) or (part.name == FINAL and place not in adapters):
                    continue
                yield Removal(str(part), size_of(part), since, f"round {row.number}: {_what(place in adapters)}")


def _what(adapter: bool) -> str:
    return "trained copy of an adapter in no release" if adapter else "checkpoints and weights"


def _stored(files: HomeFiles, trainings: str) -> dict[Path, dict[str, int]]:
    """The objects of a round's trainings, by what they were put as: a training's folder, or the `final` one in it."""
    found: dict[Path, dict[str, int]] = defaultdict(dict)
    for name, size in files.sizes(trainings).items():
        found[Path(name).parent][name] = size
    return found


def _copies(home: Path, store: Store) -> Iterator[Removal]:
    """Adapters that were fetched from MLflow, or copied for servers, and belong to no release; a server may still have
    to read the others. A gateway and a round have each a name of their own for them."""
    members = [member for row in store.rows(ReleaseRow) for member in row.members.items()]
    origins = {adapter.id: adapter.round_id for adapter in store.rows(AdapterRow)}
    needed = {version_name(c, m) for c, m in members}
    needed |= {round_name(c, origins.get(m["adapter_id"], ""), m["sha256"]) for c, m in members}
    for name in COPIES:
        for part in _entries(home / name):
            if part.name not in needed:
                try:
                    since = datetime.fromtimestamp(part.lstat().st_mtime, UTC)
                except FileNotFoundError:
                    continue  # a copy that was being fetched has its name now
                yield Removal(str(part), size_of(part), since, "fetched copy of an adapter in no release")


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder of the home. A link leads elsewhere and is left alone."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if not entry.is_symlink())
