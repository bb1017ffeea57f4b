"""Finding releases, and what tells two of them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from db import BarredRow, GatePlanRow, ReleaseRow, ReleaseState, Round, StageRow, StageState, Store
from db.rows.conversations import TRAFFIC
from errors import ConfigurationError, StoreError
from settings import Settings

# The stages whose results say what a round made live, and what it tested. This room is below theirs.
GATE, TEST = "gate", "test"
# What the gate adds to the evidence of the candidate that it judges.
JUDGED = "verdicts"
# The profile of a round that checks everything and plays nothing.
DRY = "dry"


class Basis(NamedTuple):
    """What a release stands on: base model, its revision, and hash of the target's data. Two releases must share it to
    be compared."""

    base: str
    base_revision: str
    data_hash: str

    @classmethod
    def of(cls, release: ReleaseRow) -> Basis:
        return cls(release.base, release.base_revision, release.data_hash)


def live_release(store: Store, target: str) -> ReleaseRow | None:
    """What answers the users of a target; None: the bare base."""
    return store.row(ReleaseRow, target=target, state=ReleaseState.LIVE)


def served_round(store: Store, target: str | None = None) -> Round | None:
    """The round whose target a gateway serves: the one that was begun last on `target`, or without `target` on any
    target that makes releases. A dry round says nothing of what the home is for, so it counts only where there is no
    other. None: the store has nothing to serve."""
    asked = [r for r in store.rows(Round) if (r.target == target if target else r.target != TRAFFIC)]
    return max(asked, key=lambda r: (r.profile != DRY, r.number), default=None)


def set_target(settings: Settings) -> str | None:
    """The target that is given or set; None where the settings have their default."""
    return settings.target if "target" in settings.model_fields_set else None


def target_named(store: Store, settings: Settings, live: bool = False) -> str:
    """The target that a command looks at: the one that is given or set; without one, the target of the newest round
    that can be served, or in an empty store the settings' default. With `live` the command is about what is live: then
    it is the only target that has a live release. Raises `ConfigurationError` where several targets have one, and for
    a target that the store has nothing of while it has others."""
    wanted = settings.target
    if set_target(settings) is None:
        answering = sorted({r.target for r in store.rows(ReleaseRow, state=ReleaseState.LIVE)}) if live else []
        if len(answering) > 1:
            raise ConfigurationError(
                f"releases of {', '.join(answering)} are live in {store.url}; say with --target which is meant"
            )
        if answering:
            return answering[0]
        if newest := served_round(store):
            return newest.target
    known = {r.target for r in store.rows(Round)} | {r.target for r in store.rows(ReleaseRow)}
    if known and wanted not in known:
        raise ConfigurationError(
            f"{store.url} has no round of {wanted!r}, but of {', '.join(sorted(known))}; give one of these with "
            f"--target, or run 'trace-agent improve --target {wanted}' first"
        )
    return wanted


def release_of_round(store: Store, round_id: str) -> ReleaseRow | None:
    """The release that a round made; see `made_by_round`."""
    return made_by_round(store.rows(ReleaseRow, round_id=round_id)).get(round_id)


def made_by_round(releases: Iterable[ReleaseRow]) -> dict[str, ReleaseRow]:
    """The one release among these that each round made, by its id: what its gate has judged, else its last. There may
    be others: a first candidate whose router was fitted again, and what an attempt that was broken off assembled."""
    found: dict[str, ReleaseRow] = {}
    for row in sorted(releases, key=lambda row: (JUDGED in row.evidence, row.number)):
        if row.round_id is not None:
            found[row.round_id] = row
    return found


def releases_of(store: Store, target: str) -> list[ReleaseRow]:
    """All releases of a target, oldest first."""
    return sorted(store.rows(ReleaseRow, target=target), key=lambda row: row.number)


def live_around(store: Store, rounds: Sequence[Round]) -> dict[str, tuple[int, int]]:
    """Numbers of the releases that were live before and after each of some rounds (0: the bare base), by its id.

    What a round goes on from is its parent. In a new lineage that is the bare base, while a release goes on answering:
    before the round was what the gate's plan compared with, and where there was no plan and nothing was promoted, what
    was tested.
    """
    ids = [r.id for r in rounds]
    parents = store.rows(ReleaseRow, id=sorted({r.parent_id for r in rounds if r.parent_id}))
    numbers = {r.id: r.number for r in parents}
    plans = {p.round_id: p.rules.get("against") for p in store.rows(GatePlanRow, round_id=ids)}
    done = store.rows(StageRow, round_id=ids, name=[GATE, TEST], state=StageState.DONE)
    said = {(s.round_id, s.name): int((s.result or {}).get("release") or 0) for s in done}
    own = {(r.round_id, r.number) for r in store.rows(ReleaseRow, round_id=ids)}
    found = {}
    for row in rounds:
        made, tested = said.get((row.id, GATE), 0), said.get((row.id, TEST))
        if tested and (row.id, tested) in own:
            made = tested
        before = plans.get(row.id)
        if before is None:
            parent = numbers.get(row.parent_id or "", 0)
            before = parent if made or tested is None else tested
        found[row.id] = int(before), made or int(before)
    return found


def release_numbered(store: Store, target: str, number: int) -> ReleaseRow:
    """A release by its number; `StoreError` names those that exist."""
    known = {row.number: row for row in releases_of(store, target)}
    if number not in known:
        have = f"it has {', '.join(map(str, known))}" if known else "it has none yet; run 'trace-agent improve'"
        raise StoreError(f"target {target!r} has no release {number}; {have}")
    return known[number]


def barred(store: Store, target: str) -> dict[str, BarredRow]:
    """The adapters that may not be promoted automatically, by their digest."""
    return {row.sha256: row for row in store.rows(BarredRow, target=target, allowed_at=None)}


def version_name(capability: str, member: Mapping[str, str]) -> str:
    """A member of a release as the gateway names it."""
    return f"{capability}@v{member['version']}-{member['sha256'][:8]}"


def stored_release(store: Store, release_id: str) -> ReleaseRow:
    """A release by id; `StoreError` when there is none."""
    found = store.row(ReleaseRow, id=release_id)
    if found is None:
        raise StoreError(f"there is no release {release_id!r} in {store.url}; 'trace-agent history' lists them")
    return found


def apart(release: ReleaseRow, basis: Basis) -> str:
    """Why a release cannot be compared with what stands on `basis`; "" when it can."""
    if (release.base, release.base_revision) != (basis.base, basis.base_revision):
        return f"it stands on {base_name(release)}, not on {basis.base}@{basis.base_revision}"
    if release.data_hash != basis.data_hash:
        return f"the target's data changed from {release.data_hash} to {basis.data_hash}"
    return ""


def replaced_lineage(store: Store, first: ReleaseRow) -> ReleaseRow | None:
    """The release of other data, on the same base, that the first one of a lineage replaced when it went live, while
    that one is retired; None: the bare base was live before it, or what was has been rolled back since."""
    history = first.evidence.get("history", ())
    went_live = {datetime.fromisoformat(entry["at"]) for entry in history if entry["state"] == ReleaseState.LIVE}
    retired = store.rows(ReleaseRow, target=first.target, state=ReleaseState.RETIRED)
    older = [r for r in retired if r.data_hash != first.data_hash and base_name(r) == base_name(first)]
    return max((r for r in older if r.ended_at in went_live), key=lambda row: row.number, default=None)


def base_name(release: ReleaseRow) -> str:
    """Base model and revision, as people read them."""
    return f"{release.base}@{release.base_revision}"


def check_same_base(release: ReleaseRow, live: ReleaseRow) -> None:
    """Raise `ConfigurationError` unless both stand on one base: a server holds the adapters of one base only."""
    if base_name(release) != base_name(live):
        raise ConfigurationError(
            f"release {release.number} of {release.target} stands on {base_name(release)}, the live release "
            f"{live.number} on {base_name(live)}; go back to the bare base first: trace-agent rollback --to 0"
        )


def check_live_base(store: Store, target: str, base_model: str) -> None:
    """Raise `ConfigurationError` where what is live stands on another base model than a round is to have: the round
    would have to beat it, and its adapters do not fit. A changed revision is seen when the model is loaded."""
    live = live_release(store, target)
    if live is not None and live.base != base_model:
        raise ConfigurationError(
            f"release {live.number} of {target} is live and stands on {live.base}, the settings' base model is "
            f"{base_model}; give --base-model {live.base}, another --home, or begin anew from the bare base: "
            f"trace-agent rollback --to 0 --target {target}"
        )
