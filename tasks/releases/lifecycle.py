"""The life of a release: candidate, live, retired, rolled back, refused.

The database is the truth: a promotion or a rollback is one transaction of it. `publish` then makes MLflow say the same;
it is called before and after every change and at every start, so that a death in between is mended by the next.
An MLflow server that is away therefore keeps nobody from leaving a release.
What a round may do by itself is less than what a person may do (`by_hand`): see `promote`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select

from db import AdapterRow, AdapterState, ReleaseRow, ReleaseState, Store, row_id
from db.engine import database_time
from db.queries import rows
from db.schema import TABLES
from db.writes import move_row, put_rows
from errors import AdapterError, ConfigurationError, StoreError
from models.adapters.registry import Registry
from models.adapters.releases import answering
from tasks.releases import moves
from tasks.releases.lookup import (
    Basis,
    apart,
    barred,
    base_name,
    check_same_base,
    live_release,
    release_numbered,
    releases_of,
    replaced_lineage,
    stored_release,
    version_name,
)
from tasks.releases.publication import check_files, member_adapters, publish, release_router
from tasks.unattended.servers import check_mlflow

__all__ = [
    "add_evidence",
    "barred",
    "check_files",
    "heal",
    "live_release",
    "member_adapters",
    "new_candidate",
    "promote",
    "publish",
    "refuse",
    "release_numbered",
    "release_router",
    "releases_of",
    "rollback",
]

logger = logging.getLogger("trace")

# States from which `rollback` may bring a release back: it was live once.
WAS_LIVE = (ReleaseState.RETIRED, ReleaseState.ROLLED_BACK)


def new_candidate(
    store: Store,
    *,
    target: str,
    parent: ReleaseRow | None,
    round_id: str | None,
    basis: Basis,
    members: Mapping[str, Mapping[str, str]],
    router: str = "",
    router_path: str = "",
    evidence: Mapping[str, Any] | None = None,
) -> ReleaseRow:
    """A release with the next number of its target, in state `candidate`.

    The same round with the same parent, members and router gives the row that is there (without a round: while it is a
    candidate). Raises `ConfigurationError` for members that are not whole, stand on another base, or are not the
    stored adapters, and for a parent on another base or other data.
    """
    sorted_members = {capability: dict(members[capability]) for capability in sorted(members)}
    moves.check_members(sorted_members)
    why = "" if parent is None else apart(parent, basis)
    if parent is not None and why:
        raise ConfigurationError(
            f"release {parent.number} cannot be the parent of a candidate: {why}; give no parent, so that a new "
            "lineage begins from the bare base"
        )
    parent_id = None if parent is None else parent.id
    with store.transaction() as connection:
        moves.check_adapters(connection, sorted_members, basis)
        for known in rows(connection, ReleaseRow, {"target": target, "round_id": round_id, "parent_id": parent_id}):
            same = known.members == sorted_members and known.router == router
            if same and (round_id is not None or known.state == ReleaseState.CANDIDATE):
                return known
        table = TABLES[ReleaseRow.TABLE]
        newest = select(func.coalesce(func.max(table.c.number), 0)).where(table.c.target == target)
        number = connection.execute(newest).scalar_one() + 1
        row = ReleaseRow(
            id=row_id("release", target, number),
            target=target,
            number=number,
            parent_id=parent_id,
            round_id=round_id,
            base=basis.base,
            base_revision=basis.base_revision,
            data_hash=basis.data_hash,
            members=sorted_members,
            router=router,
            router_path=router_path,
            state=ReleaseState.CANDIDATE,
            evidence=dict(evidence or {}),
            created_at=database_time(connection),
        )
        put_rows(connection, [row], replace=False)
        return moves.release_row(connection, row.id)


def promote(store: Store, registry: Registry, release_id: str, reason: str, by_hand: bool = False) -> ReleaseRow:
    """Make a release live, its predecessor retired, their adapters champions and retired; then `publish`.

    A round may promote a candidate whose parent is live (or, of a new lineage, without parent), that its gate's plan
    compared with what is live, and whose adapters are not barred. `by_hand` may promote any release on the live one's
    base; what was barred of it is allowed again. A release that is live already is only published. Raises
    `ConfigurationError`, `TransitionError`, `AdapterError` (a member's files are gone or changed) or `StoreError`
    (MLflow, which has the files, does not answer), and what is live stays live.
    """
    wanted = stored_release(store, release_id)
    heal(store, registry, wanted.target)
    if wanted.state != ReleaseState.LIVE:
        _check_reachable_files(registry, wanted, "bring it back, then promote again")
    with store.transaction() as connection:
        row, live = moves.release_row(connection, release_id), moves.live_row(connection, wanted.target)
        if row.state != ReleaseState.LIVE:
            moves.check_promotion(connection, row, live, by_hand)
            if by_hand:
                moves.allow_adapters(connection, row)
            moves.swap(connection, row.target, live, row, (ReleaseState.RETIRED, reason))
    publish(store, registry, wanted.target)
    return stored_release(store, release_id)


def refuse(store: Store, release_id: str, reason: str) -> ReleaseRow:
    """End a candidate, and the adapters that only it would have made champions. Again it changes nothing."""
    with store.transaction() as connection:
        row, now = moves.release_row(connection, release_id), database_time(connection)
        if row.state != ReleaseState.REFUSED:
            moves.move_release(connection, row, ReleaseState.REFUSED, reason, now)
        for adapter in moves.member_rows(connection, row):
            if adapter.state == AdapterState.REGISTERED:
                move_row(connection, AdapterRow, adapter.id, AdapterState.REJECTED, {})
        return moves.release_row(connection, release_id)


def add_evidence(store: Store, release_id: str, evidence: Mapping[str, Any]) -> None:
    """Add to what a release says of how it came to be. Its state and its history stay as they are now, whoever moved
    it since the caller read it. Raises `StoreError` when there is no such release."""
    with store.transaction() as connection:
        row = moves.release_row(connection, release_id)
        move_row(connection, ReleaseRow, row.id, row.state, {"evidence": {**row.evidence, **evidence}})


def rollback(
    store: Store, registry: Registry, target: str, to: int | None = None, expected: str | None = None
) -> ReleaseRow | None:
    """Make an earlier release live again, and return it; None: the bare base answers again.

    Without `to` it is the nearest ancestor of the live one that was not rolled back itself and holds no barred adapter,
    or, where the first of them began a new lineage, what that one replaced; `to` 0 is the bare base.
    Adapters that are in the release rolled back and not in the restored one are barred from automatic promotion until
    a person allows them. Who names a release in `to` allows its own. `expected` is the id of the release that is to be
    left, where the caller has judged that one.
    MLflow follows the store; where it does not answer, that is a warning and the next command tells it.
    Raises `ConfigurationError` when there is nothing to go back to, another release is live than `expected`, or `to`
    names one that was never live or stands on another base, `AdapterError` when the restored release's files are gone,
    `StoreError` when MLflow, which has these files, does not answer: the bare base needs none and can be gone back to.
    """
    heal(store, registry, target)
    live, back = _destination(store, target, to)
    if back is not None:
        way_out = f"bring it back, or leave release {live.number} now: trace-agent rollback --to 0 --target {target}"
        _check_reachable_files(registry, back, way_out)
    with store.transaction() as connection:
        now_live = moves.live_row(connection, target)
        left = live if expected is None else moves.release_row(connection, expected)
        if now_live is None or not now_live.id == live.id == left.id:
            raise ConfigurationError(
                f"release {left.number} of {target} was live and no longer is: another process replaced it; look at "
                "'trace-agent history', then roll back again"
            )
        said = f"rolled back to {'the bare base' if back is None else f'release {back.number}'}"
        moves.bar_adapters(connection, live, back, said)
        if to is not None and back is not None:
            # Else no candidate that inherits them could be promoted.
            moves.allow_adapters(connection, back)
        moves.swap(connection, target, live, back, (ReleaseState.ROLLED_BACK, said))
    heal(store, registry, target, "rolled back; MLflow follows with the next command")
    return None if back is None else stored_release(store, back.id)


def heal(store: Store, registry: Registry, target: str, done: str = "MLflow cannot show what is live") -> None:
    """`publish` at a start, before a change, or after a rollback (`done` says so). What it refuses is only a warning,
    because neither a damaged release nor an MLflow that is away, damaged or of another version may keep anybody from
    looking at a release or leaving it."""
    try:
        check_mlflow(registry.tracking_uri)
        publish(store, registry, target)
    except (AdapterError, StoreError) as problem:
        logger.warning("%s: %s", done, problem)


def _check_reachable_files(registry: Registry, release: ReleaseRow, way_out: str) -> None:
    """`check_files`, with one `StoreError` that ends in `way_out` where MLflow does not answer."""
    try:
        check_mlflow(registry.tracking_uri)
        with answering(registry, f"that release {release.number} is to be checked"):
            check_files(registry, release)
    except StoreError as problem:
        unchecked = StoreError(
            f"the files of release {release.number} of {release.target} cannot be checked, so it does not go live: "
            f"{str(problem).partition(';')[0]}; {way_out}"
        )
        unchecked.transient = problem.transient
        raise unchecked from None


def _destination(store: Store, target: str, to: int | None) -> tuple[ReleaseRow, ReleaseRow | None]:
    """The live release, and where a rollback leads (None: the bare base)."""
    live = live_release(store, target)
    if live is None:
        raise ConfigurationError(f"nothing to go back to: the bare base answers for {target}, no release is live")
    if to is None:
        back = live
        while back.parent_id is not None:
            back = stored_release(store, back.parent_id)
            if back.state == ReleaseState.RETIRED and base_name(back) == base_name(live) and _allowed(store, back):
                return live, back
        replaced = replaced_lineage(store, back)
        return live, replaced if replaced is not None and _allowed(store, replaced) else None
    if to == 0:
        return live, None
    back = release_numbered(store, target, to)
    if back.id == live.id:
        raise ConfigurationError(
            f"release {to} of {target} is live already; give an earlier one, or 0 for the bare base"
        )
    if back.state not in WAS_LIVE:
        raise ConfigurationError(
            f"release {to} of {target} is {back.state} and was never live; 'trace-agent promote {to}' makes it live"
        )
    check_same_base(back, live)
    return live, back


def _allowed(store: Store, ancestor: ReleaseRow) -> bool:
    """Whether none of its adapters is barred: no round could go on from it. One that is passed over is told."""
    bars = barred(store, ancestor.target)
    held = [version_name(c, m) for c, m in ancestor.members.items() if m["sha256"] in bars]
    if held:
        logger.warning(
            "release %d of %s is passed over: %s is barred from automatic promotion; to go back to it all the same: "
            "trace-agent rollback --to %d --target %s",
            ancestor.number, ancestor.target, ", ".join(held), ancestor.number, ancestor.target,
        )  # fmt: skip
    return not held
