"""What a promotion or a rollback changes in the store: every function here works inside its caller's transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import Connection

from db import AdapterRow, AdapterState, BarredRow, GatePlanRow, ReleaseRow, ReleaseState, Round
from db.engine import database_time
from db.queries import rows
from db.writes import move_row, put_rows
from errors import ConfigurationError, StoreError, TransitionError
from tasks.releases.lookup import Basis, apart, check_same_base

MEMBER = ("adapter_id", "model", "version", "sha256")


def release_row(connection: Connection, release_id: str) -> ReleaseRow:
    """A release by id; `StoreError` when there is none."""
    found = rows(connection, ReleaseRow, {"id": release_id})
    if not found:
        raise StoreError(f"there is no release {release_id!r}; 'trace-agent history' lists them")
    return found[0]


def live_row(connection: Connection, target: str) -> ReleaseRow | None:
    """The live release of a target; None: the bare base."""
    return next(iter(rows(connection, ReleaseRow, {"target": target, "state": ReleaseState.LIVE})), None)


def check_promotion(connection: Connection, row: ReleaseRow, live: ReleaseRow | None, by_hand: bool) -> None:
    """Raise unless `row` may take the place of `live`: a round's candidate only that of what it was compared with."""
    if by_hand:
        if live is not None:
            check_same_base(row, live)
        return
    by_person = f"a person may do it: trace-agent promote {row.number} --target {row.target}"
    if row.state != ReleaseState.CANDIDATE:
        raise TransitionError(f"release {row.number} of {row.target} is {row.state}, not a candidate; {by_person}")
    new_lineage = row.parent_id is None and live is not None and bool(apart(live, Basis.of(row)))
    if live is not None and live.id != row.parent_id and not new_lineage:
        raise ConfigurationError(
            f"release {row.number} of {row.target} was not compared with the live release {live.number}: "
            f"{_parent(connection, row)}; run another round, or {by_person}"
        )
    if live is None and row.parent_id is not None:
        raise ConfigurationError(
            f"release {row.number} of {row.target} cannot follow the bare base: {_parent(connection, row)}, which is "
            f"no longer live; run another round, or {by_person}"
        )
    against, now = _compared_with(connection, row), 0 if live is None else live.number
    if against not in (None, now):
        before, after = (f"release {n}" if n else "the bare base" for n in (against, now))
        raise ConfigurationError(
            f"release {row.number} of {row.target} was compared with {before}, and {after} answers now; run another "
            f"round, or {by_person}"
        )
    bars = {b.sha256: b for b in rows(connection, BarredRow, {"target": row.target, "allowed_at": None})}
    for member in row.members.values():
        if member["sha256"] in bars:
            raise ConfigurationError(
                f"release {row.number} of {row.target} holds {member['model']} version {member['version']} "
                f"({member['sha256'][:16]}...), which is barred: {bars[member['sha256']].reason}; {by_person}"
            )


def swap(
    connection: Connection,
    target: str,
    old: ReleaseRow | None,
    new: ReleaseRow | None,
    ending: tuple[ReleaseState, str],
) -> None:
    """`new` takes the place of `old`, which ends as `ending` says; the same for their adapters."""
    now, (state, reason) = database_time(connection), ending
    if old is not None:
        replaced = reason if state == ReleaseState.ROLLED_BACK else f"replaced by release {new and new.number}"
        move_release(connection, old, state, replaced, now)
    if new is not None:
        restored = f"release {old and old.number} was rolled back" if state == ReleaseState.ROLLED_BACK else reason
        move_release(connection, new, ReleaseState.LIVE, restored, now)
    members = set() if new is None else {m["adapter_id"] for m in new.members.values()}
    rounds = {r.id for r in rows(connection, Round, {"target": target})}
    for champion in rows(connection, AdapterRow, {"state": AdapterState.CHAMPION}):
        if champion.round_id in rounds and champion.id not in members:
            move_row(connection, AdapterRow, champion.id, AdapterState.RETIRED, {})
    for identity in sorted(members - {""}):
        move_row(connection, AdapterRow, identity, AdapterState.CHAMPION, {})


def move_release(connection: Connection, row: ReleaseRow, state: ReleaseState, reason: str, now: datetime) -> None:
    """Move a release, and keep when and why under `history` in its evidence."""
    entry = {"state": str(state), "at": now.isoformat(), "reason": reason}
    evidence = {**row.evidence, "history": [*row.evidence.get("history", ()), entry]}
    times = {"live_at": now, "ended_at": None} if state == ReleaseState.LIVE else {"ended_at": now}
    move_row(connection, ReleaseRow, row.id, state, {"reason": reason, "evidence": evidence, **times})


def bar_adapters(connection: Connection, live: ReleaseRow, back: ReleaseRow | None, said: str) -> None:
    """Bar the adapters that the release which is rolled back holds and the restored one does not."""
    kept = set() if back is None else {m["sha256"] for m in back.members.values()}
    reason = f"release {live.number} was {said}"
    gone = sorted({m["sha256"] for m in live.members.values()} - kept)
    now = database_time(connection)
    put_rows(
        connection,
        [BarredRow(target=live.target, sha256=s, release_id=live.id, reason=reason, since=now) for s in gone],
        replace=True,
    )


def allow_adapters(connection: Connection, release: ReleaseRow) -> list[str]:
    """Lift the bars on a release's adapters; the capabilities whose adapter was barred."""
    now, lifted = database_time(connection), []
    bars = {b.sha256: b for b in rows(connection, BarredRow, {"target": release.target, "allowed_at": None})}
    for capability, member in release.members.items():
        bar = bars.get(member["sha256"])
        if bar is not None:
            put_rows(connection, [BarredRow(**{**asdict(bar), "allowed_at": now})], replace=True)
            lifted.append(capability)
    return lifted


def member_rows(connection: Connection, release: ReleaseRow) -> list[AdapterRow]:
    """The stored adapters of a release; blends have none."""
    return rows(connection, AdapterRow, {"id": [m["adapter_id"] for m in release.members.values()]})


def _compared_with(connection: Connection, row: ReleaseRow) -> int | None:
    """The number of the release that the plan of a candidate's round compares with (0: the bare base); None without a
    plan. A candidate of a new lineage has no parent that would say it."""
    plans = [] if row.round_id is None else rows(connection, GatePlanRow, {"round_id": row.round_id})
    return next((int(plan.rules["against"]) for plan in plans if "against" in plan.rules), None)


def _parent(connection: Connection, row: ReleaseRow) -> str:
    if row.parent_id is None:
        return "it was made from the bare base"
    return f"it was made from release {release_row(connection, row.parent_id).number}"


def check_members(members: Mapping[str, Mapping[str, str]]) -> None:
    """Raise unless there are members, each with all of `MEMBER`."""
    if not members:
        raise ConfigurationError("a release without adapters is the bare base; go back to it with rollback --to 0")
    for capability, member in members.items():
        if sorted(member) != sorted(MEMBER) or not all(member[k] for k in MEMBER[1:]):
            raise ConfigurationError(
                f"member {capability!r} is {dict(member)}; it needs {', '.join(MEMBER)} (adapter_id may be empty)"
            )


def check_adapters(connection: Connection, members: Mapping[str, Mapping[str, str]], basis: Basis) -> None:
    """Raise unless the members are stored adapters, with the same digest and on the same base."""
    for capability, member in members.items():
        if not member["adapter_id"]:
            continue
        stored = next(iter(rows(connection, AdapterRow, {"id": member["adapter_id"]})), None)
        found = None if stored is None else (stored.sha256, stored.base, stored.base_revision)
        if found != (member["sha256"], basis.base, basis.base_revision):
            raise ConfigurationError(
                f"member {capability!r} of a candidate on {basis.base} is given as {member['sha256'][:16]}..., but "
                f"adapter {member['adapter_id']!r} is stored as (SHA-256, base, revision) {found}; give the stored one"
            )
