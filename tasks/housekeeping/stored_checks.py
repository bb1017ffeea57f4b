"""What the home holds: the database, its clock and leases, and the releases with their files. Nothing is changed: a
database of an older schema is not opened further, as that would migrate it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from db import AdapterRow, ReleaseRow, ReleaseState, Round, RoundState, StageRow, StageState, Store, open_store
from db.copies import sqlite_file
from db.engine import make_engines, parse_url, show
from db.migrate import known_revisions, stored_revision
from db.rows import PROCESS
from db.schema import HEAD
from db.values.states import is_final
from db.values.types import utc_now
from errors import AdapterError, StoreError
from models.adapters.addresses import artifact_roots
from models.adapters.files import adapter_digest
from models.adapters.registry import Registry
from models.adapters.releases import answering, read_aliases
from models.objects import files_of
from settings import Settings
from tasks.housekeeping.findings import Finding, Level, fault, of_sqlite, refused, warning, well
from tasks.releases.lifecycle import check_files, live_release, release_router
from tasks.round.registry import ARTIFACTS, CLOCK, artifact_storage, open_registry
from tasks.unattended.left_behind import left_behind

# What answers users, and what a rollback may lead to.
NEEDED = (ReleaseState.LIVE, ReleaseState.RETIRED, ReleaseState.ROLLED_BACK)


def stored_findings(settings: Settings, registry_answers: bool) -> Iterator[Finding]:
    """All checks of this file; those of releases only where MLflow answers."""
    found = database(settings)
    yield found
    file = sqlite_file(settings.database_url)
    if found.level != Level.OK or (file is not None and not file.is_file()):
        return
    with open_store(settings.database_url) as store:
        yield clock(store, server=file is None)
        yield from leases(store)
        if registry_answers:
            yield from releases(settings, store)


def database(settings: Settings) -> Finding:
    """The store answers, is whole, and has the schema of this program."""
    url = parse_url(settings.database_url)
    file = sqlite_file(settings.database_url)
    if file is not None:
        if not file.is_file():
            return _gone(settings, file) or well("database", f"{file} is made by the first round")
        if wrong := of_sqlite("database", file):
            return wrong
    engines = make_engines(url)
    try:
        if found := refused("database", lambda: stored_revision(engines)):
            return found
        revision = stored_revision(engines)
    finally:
        engines.dispose()
    if revision == HEAD:
        return well("database", f"{show(url)}, schema {revision}")
    if revision is not None and revision not in known_revisions():
        return fault(
            "database",
            f"{show(url)} has schema {revision!r}, this program knows up to {HEAD!r}",
            "install the version that wrote it, or a newer one",
        )
    said = f"{show(url)} has schema {revision or 'none'}, this program's is {HEAD}"
    return warning("database", said, "'trace-agent backup' first, then 'trace-agent db upgrade'")


def _gone(settings: Settings, file: Path) -> Finding | None:
    """The fault of a home whose rounds have left their reports, and whose database is not there."""
    reports = sorted(settings.folder.glob("*/report.html"))
    if not reports:
        return None
    said = f"{file} is not there, and {reports[0].parent.name} has a report: the next round would begin from nothing"
    return fault("database", said, "correct TRACE_DATABASE if it names another one, or restore a backup")


def clock(store: Store, server: bool) -> Finding:
    """This machine's clock, by what the store says has happened already, and by the database's `server` if it has
    one."""
    now = utc_now()
    there = store.query("SELECT clock_timestamp() AS now")["now"][0].to_pydatetime() if server else now
    moments = [r.started_at for r in store.rows(Round)] + [s.heartbeat_at for s in store.rows(StageRow)]
    moments += [process.heartbeat_at for process in store.presences()]
    newest = max((m for m in moments if m is not None), default=now)
    do = "set this machine's clock (chrony or systemd-timesyncd): leases and schedules go by it"
    if abs(now - there) > CLOCK:
        return fault("clock", f"the clock is {(now - there).total_seconds():+.0f} s from the database server's", do)
    if newest - now > CLOCK:
        return fault("clock", f"the store has what happened {(newest - now).total_seconds():.0f} s from now", do)
    return well("clock", f"{now:%Y-%m-%d %H:%M:%S} UTC")


def leases(store: Store) -> Iterator[Finding]:
    """Stages whose process died, and rounds where it died between two: their lease ran out, and nobody took them
    over; and rounds that were stopped, however that was, and left behind by later ones."""
    rounds = {r.id: r for r in store.rows(Round)}
    now, stages = utc_now(), store.rows(StageRow, state=StageState.RUNNING)
    left = [row for row in stages if row.lease_until is not None and row.lease_until < now]
    left = [row for row in left if not is_final(rounds[row.round_id].state)]
    # Who left a stage is told with it. A round that has ended is owed nothing.
    told = {row.round_id for row in left} | {i for i, r in rounds.items() if r.state != RoundState.RUNNING}
    told |= {row.round_id for row in store.held()}  # another process goes on with it
    behind = {one.round.id: one for one in left_behind(store)}
    left = [row for row in left if row.round_id not in behind]
    told |= behind.keys()
    between = [row for row in store.presences() if row.round_id not in told]
    left += [row for row in between if row.lease_until is not None and row.lease_until < now]
    for row in left:
        number = rounds[row.round_id].number
        what = f"round {number}" if row.name.startswith(PROCESS) else f"stage {row.name} of round {number}"
        yield warning(
            "leases",
            f"{what} was left by {row.owner} at {row.heartbeat_at:%Y-%m-%d %H:%M} UTC",
            "run the same 'trace-agent improve' or deployment: it goes on from there",
        )
    for one in behind.values():
        yield warning(
            "leases",
            f"{one.text()}: nobody goes on with it, and its files stay",
            f"the settings that it was begun with go on with it ('trace-agent show {one.round.number}'); 'trace-agent "
            "clean' gives it up",
        )
    if not left and not behind:
        yield well("leases", f"{len(stages)} stages at work, none left behind")


def releases(settings: Settings, store: Store) -> Iterator[Finding]:
    """The releases of every target: aliases, and the files of what is live or was."""
    rows = [row for row in store.rows(ReleaseRow) if row.state in NEEDED]
    if not rows:
        yield well("releases", "there is none yet: the bare base answers")
        return
    file = sqlite_file(settings.tracking_uri) if settings.tracking_uri.startswith("sqlite:") else None
    if file is not None and not file.is_file():
        yield fault("mlflow", f"{file} is gone, and releases need it", "restore a backup ('trace-agent restore')")
        return
    if file is not None and (astray := artifact_roots(file) - _artifact_folders(settings)):
        yield fault(
            "artifacts",
            f"MLflow looks for them in {', '.join(map(str, sorted(astray)))}: the home was moved by hand",
            f"'trace-agent backup FILE --home {settings.folder}', then 'trace-agent restore FILE --home NEW'",
        )
        return
    for target in sorted({row.target for row in rows}):
        registry = open_registry(settings, target)
        mine = [row for row in rows if row.target == target]
        yield from aliases(store, registry, target)
        yield from release_files(settings, store, registry, mine)


def aliases(store: Store, registry: Registry, target: str) -> Iterator[Finding]:
    """MLflow's aliases are those of the live release."""
    live = live_release(store, target)
    wanted = {} if live is None else {m["model"]: m["version"] for m in live.members.values()}
    with answering(registry, f"what is live on {target}"):
        said = read_aliases(registry)
    wrong = [
        f"champion of {model} is {said.champions.get(model, 'none')}, not {wanted.get(model, 'none')}"
        for model in sorted(wanted.keys() | said.champions.keys())
        if said.champions.get(model) != wanted.get(model)
    ]
    if said.live != (None if live is None else live.id):
        wrong.append(f"live is {said.live or 'none'}, not {'none' if live is None else live.id}")
    name = "the bare base" if live is None else f"release {live.number}"
    if wrong:
        do = f"'trace-agent history --target {target}' puts them back: the database decides"
        yield warning("aliases", f"{name} of {target} is live, and MLflow says otherwise: {'; '.join(wrong)}", do)
    else:
        yield well("aliases", f"{target}: {name} is live, in MLflow too")


def release_files(settings: Settings, store: Store, registry: Registry, rows: list[ReleaseRow]) -> Iterator[Finding]:
    """Adapters and routers of releases, each once, with the releases that need it."""
    adapters: dict[tuple[str, str, str], list[ReleaseRow]] = defaultdict(list)
    routers: dict[tuple[str, str], list[ReleaseRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: -r.number):
        for capability, member in row.members.items():
            adapters[capability, member["version"], member["sha256"]].append(row)
        if row.router_path:
            routers[row.router_path, row.router].append(row)
    bad = 0
    for (capability, version, _), holders in sorted(adapters.items()):
        # The live one's trained copy is looked at as well, also where a release that was left is newer and holds it.
        holder = next((row for row in holders if row.state == ReleaseState.LIVE), holders[0])
        alone = replace(holder, members={capability: holder.members[capability]})
        found = refused("adapters", lambda alone=alone: check_files(registry, alone))  # type: ignore[misc]
        found = found or _trained_copy(settings, store, alone)
        if found:
            bad += 1
            yield replace(found, said=f"{capability} v{version} ({_held(holders)}): {found.said}")
    for holders in routers.values():
        found = refused("router", lambda row=holders[0]: release_router(settings.folder, row, settings.files))  # type: ignore[misc]
        found = found or _stored_copy(settings, "router", holders[0].router_path or "")
        if found:
            bad += 1
            yield replace(found, said=f"{_held(holders)}: {found.said}")
    if not bad:
        target = rows[0].target
        yield well(
            "adapters", f"{target}: {len(adapters)} adapters and {len(routers)} routers of {_held(rows)} are whole"
        )


def _artifact_folders(settings: Settings) -> set[Path]:
    """The folders in which MLflow's files may lie."""
    storage = artifact_storage(settings)
    named = [Path(unquote(urlsplit(storage).path))] if storage.startswith("file:") else []
    return {place.resolve() for place in (settings.folder / ARTIFACTS, *named)}


def _trained_copy(settings: Settings, store: Store, release: ReleaseRow) -> Finding | None:
    """The next round trains on from the live release's adapters, as their rounds left them."""
    (member,) = release.members.values()
    row = store.row(AdapterRow, id=member["adapter_id"])
    if release.state != ReleaseState.LIVE or row is None or not row.path:
        return None
    folder = files_of(settings).fetch(row.path)

    def compare() -> None:
        if not folder.is_dir():
            raise StoreError(f"{folder}, which the next round trains on from, is gone; restore it from a backup")
        if adapter_digest(folder) != row.sha256:
            raise AdapterError(f"{folder}, which the next round trains on from, was changed; restore it from a backup")

    return refused("adapters", compare) or _stored_copy(settings, "adapters", row.path)


def _stored_copy(settings: Settings, check: str, path: str) -> Finding | None:
    """What this home has another one has to find in the storage."""
    return refused(check, lambda: files_of(settings).verify(path))


def _held(rows: list[ReleaseRow]) -> str:
    ordered = sorted(rows, key=lambda r: r.number)
    return ", ".join(f"release {r.number}" + (" (live)" if r.state == ReleaseState.LIVE else "") for r in ordered)
