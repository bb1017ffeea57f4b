"""The ledger of shards: who plays which part of the episodes that a stage owes, and until when the claim holds.

As with stages a claim is one guarded UPDATE, holds for a lease that heartbeats prolong, and can be taken over when the
lease has run out. A shard says who should play; that an episode is stored, and stored once, follows from its id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select, update

from db.engine import database_time, lock_writers
from db.ledger import Door
from db.rows.contract import row_from
from db.rows.shards import ShardRow
from db.schema import TABLES
from db.values.ids import row_id
from db.values.states import ShardState
from db.writes import insert_rows

_SHARDS = TABLES["shards"]
_OPEN = _SHARDS.c.state != ShardState.DONE


class Shards:
    """The shards of one round, made by `Store.shards`. `part` names what is played; None is all of the round."""

    def __init__(self, write: Door, read: Door, round_id: str) -> None:
        self._write, self._read, self.round_id = write, read, round_id

    def owe(self, part: str, works: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Add shards to a part: of each the number of its episodes, and what a worker has to know."""
        with self._write() as connection:
            lock_writers(connection)  # another process may owe the same part, and take the same numbers
            newest = select(func.coalesce(func.max(_SHARDS.c.number), -1)).where(_SHARDS.c.part == part)
            first = connection.execute(newest).scalar_one() + 1
            now = database_time(connection)
            rows = [
                {
                    "id": row_id(part, number),
                    "round_id": self.round_id,
                    "part": part,
                    "number": number,
                    "episodes": episodes,
                    "work": dict(work),
                    "created_at": now,
                }
                for number, (episodes, work) in enumerate(works, start=first)
            ]
            insert_rows(connection, _SHARDS, rows)

    def open(self, part: str | None = None) -> list[ShardRow]:
        """Those that are not done, in their order."""
        return self._found(_OPEN, part)

    def free(self, part: str | None = None) -> list[ShardRow]:
        """Those that may be claimed: nobody holds them, or the lease has run out."""
        with self._read() as connection:
            now = database_time(connection)
        return self._found(_claimable(now), part)

    def ahead(self, part: str | None = None) -> list[ShardRow]:
        """Those that are held, and whose last heartbeat lies ahead of the clock, which was set back since."""
        with self._read() as connection:
            now = database_time(connection)
        return self._found(and_(_SHARDS.c.state == ShardState.RUNNING, _SHARDS.c.heartbeat_at > now), part)

    def claim(self, part: str, owner: str, lease_seconds: float) -> ShardRow | None:
        """Take the first free shard; None when there is none. Counts an attempt."""
        while True:
            with self._write() as connection:
                now = database_time(connection)
                free = self._where(_claimable(now), part)
                query = select(_SHARDS.c.id).where(free).order_by(_SHARDS.c.number).limit(1)
                found = connection.execute(query).scalar_one_or_none()
                if found is None:
                    return None
                taken = connection.execute(
                    update(_SHARDS)
                    .where(_SHARDS.c.id == found, _claimable(now))
                    .values(
                        state=ShardState.RUNNING,
                        owner=owner,
                        lease_until=now + timedelta(seconds=lease_seconds),
                        heartbeat_at=now,
                        attempt=_SHARDS.c.attempt + 1,
                    )
                )
                if taken.rowcount == 1:  # else another worker was faster: the next one, then
                    return _row(connection, found)

    def heartbeat(self, owner: str, lease_seconds: float) -> int:
        """Prolong the leases of all that `owner` holds; how many these are."""
        with self._write() as connection:
            now = database_time(connection)
            values = {"heartbeat_at": now, "lease_until": now + timedelta(seconds=lease_seconds)}
            return connection.execute(update(_SHARDS).where(self._held(owner)).values(**values)).rowcount

    def finish(self, shard_id: str, owner: str) -> bool:
        """All of its episodes are stored; what workers had to know goes. False when another one holds it by now."""
        with self._write() as connection:
            values = {
                "state": ShardState.DONE,
                "finished_at": database_time(connection),
                "lease_until": None,
                "work": {},
            }
            mine = and_(_SHARDS.c.id == shard_id, self._held(owner))
            return connection.execute(update(_SHARDS).where(mine).values(**values)).rowcount == 1

    def give_back(self, owner: str) -> int:
        """All that `owner` holds is free again at once; how many these are."""
        with self._write() as connection:
            values = {"state": ShardState.PENDING, "owner": None, "lease_until": None}
            return connection.execute(update(_SHARDS).where(self._held(owner)).values(**values)).rowcount

    def withdraw(self, part: str) -> None:
        """Nobody shall begin what is left of a part; whoever is at it ends it, and what it stores counts."""
        with self._write() as connection:
            connection.execute(delete(_SHARDS).where(self._where(_OPEN, part)))

    def _held(self, owner: str) -> ColumnElement[bool]:
        return and_(
            _SHARDS.c.round_id == self.round_id, _SHARDS.c.state == ShardState.RUNNING, _SHARDS.c.owner == owner
        )

    def _where(self, condition: ColumnElement[bool], part: str | None) -> ColumnElement[bool]:
        mine = and_(_SHARDS.c.round_id == self.round_id, condition)
        return mine if part is None else and_(mine, _SHARDS.c.part == part)

    def _found(self, condition: ColumnElement[bool], part: str | None) -> list[ShardRow]:
        query = select(_SHARDS).where(self._where(condition, part)).order_by(_SHARDS.c.part, _SHARDS.c.number)
        with self._read() as connection:
            return [row_from(ShardRow, dict(row)) for row in connection.execute(query).mappings()]


def _claimable(now: Any) -> ColumnElement[bool]:
    expired = and_(_SHARDS.c.state == ShardState.RUNNING, _SHARDS.c.lease_until < now)
    return or_(_SHARDS.c.state == ShardState.PENDING, expired)


def _row(connection: Connection, shard_id: str) -> ShardRow:
    found = connection.execute(select(_SHARDS).where(_SHARDS.c.id == shard_id)).mappings().one()
    return row_from(ShardRow, dict(found))
