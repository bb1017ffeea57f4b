"""The stage ledger: who works on which stage of a round, and until when the claim holds.

A claim is one guarded UPDATE, so of any number of processes one wins. It holds for a lease that heartbeats prolong;
when a process dies its lease runs out and another may take the stage over. A stage that was lost cannot be finished
by the one who lost it. Between two stages nobody holds one, and a person may be waited for there: that a process has
the round open is said by its `Presence`.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, and_, delete, null, or_, select, update

from db.engine import database_time
from db.rows import PROCESS, StageRow, row_from
from db.schema import TABLES
from db.values.ids import row_id
from db.values.states import StageState, is_final, predecessors
from db.values.text import clean_text
from db.writes import insert_rows
from errors import StoreError, TransitionError

_STAGES = TABLES["stages"]
# Only its own machine knows that a process has ended, and may be away itself.
KEPT_SECONDS = 7 * 86_400
Door = Callable[[], AbstractContextManager[Connection]]


def owner_name() -> str:
    """A name that no other claim has: machine, process and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Stage:
    """A handle on one stage of one round, made by `Store.stage`.

    Usual course: `if stage.claim(): with stage.working(): ...; stage.finish({...})`. `lost` is set when a heartbeat
    finds that another process has taken the stage over: long work should look at it and stop.
    """

    def __init__(self, write: Door, read: Door, round_id: str, name: str) -> None:
        self._write = write
        self._read = read
        self.id = row_id(round_id, name)
        self.round_id = round_id
        self.name = name
        self.lost = threading.Event()
        self._owner: str | None = None
        self._lease = timedelta(seconds=60)
        with write() as connection:
            insert_rows(connection, _STAGES, [{"id": self.id, "round_id": round_id, "name": name}])

    def row(self) -> StageRow:
        """The stage as it stands in the database."""
        with self._read() as connection:
            return self._row(connection)

    @property
    def finished(self) -> bool:
        """Whether the stage is done or skipped, so that nothing is owed."""
        return is_final(StageState(self.row().state))

    def claim(self, owner: str | None = None, lease_seconds: float = 60.0, ended: str | None = None) -> bool:
        """Take the stage if it is pending, failed, or its lease has run out; counts an attempt. False when it is
        finished or another holds it. `ended` is an owner whose process has ended: where its last heartbeat lies ahead
        of the clock, which was set back since, its lease counts for nothing. It would run out too late, or never."""
        if lease_seconds <= 0:
            raise StoreError(f"lease of {lease_seconds!r} seconds for stage {self.name!r}; a lease is longer than 0")
        owner = owner or owner_name()
        free = predecessors(StageState.RUNNING) - {StageState.RUNNING}
        lease = timedelta(seconds=lease_seconds)
        with self._write() as connection:
            now = database_time(connection)
            spent = seconds_spent(self._row(connection))
            ahead = and_(_STAGES.c.owner == ended, _STAGES.c.heartbeat_at > now)
            expired = and_(_STAGES.c.state == StageState.RUNNING, or_(_STAGES.c.lease_until < now, ahead))
            taken = connection.execute(
                update(_STAGES)
                .where(_STAGES.c.id == self.id, or_(_STAGES.c.state.in_(sorted(free)), expired))
                .values(
                    state=StageState.RUNNING,
                    owner=owner,
                    lease_until=now + lease,
                    heartbeat_at=now,
                    attempt=_STAGES.c.attempt + 1,
                    started_at=now,
                    finished_at=None,
                    seconds=spent,
                    error=None,
                )
            )
        if taken.rowcount != 1:
            return False
        self._owner, self._lease = owner, lease
        self.lost.clear()
        return True

    def heartbeat(self) -> bool:
        """Prolong the lease. False when this process no longer holds the stage (then `lost` is set)."""
        with self._write() as connection:
            now = database_time(connection)
            values = {"heartbeat_at": now, "lease_until": now + self._lease}
            held = connection.execute(update(_STAGES).where(self._ours()).values(**values)).rowcount == 1
        if not held:
            self.lost.set()
        return held

    def finish(self, result: Mapping[str, Any] | None = None) -> None:
        """Mark the stage as done and store its result. Raises `TransitionError` when this process does not hold it."""
        self._end(StageState.DONE, {"result": None if result is None else dict(result)})

    def fail(self, error: str) -> None:
        """Mark the stage as failed and store why; it may be claimed again."""
        self._end(StageState.FAILED, {"error": clean_text(error)})

    def skip(self, reason: str) -> None:
        """Mark the stage as skipped for good; `reason` says why. It works with and without a claim."""
        with self._write() as connection:
            now = database_time(connection)
            unclaimed = predecessors(StageState.SKIPPED) - {StageState.RUNNING}
            done = connection.execute(
                update(_STAGES)
                .where(or_(self._ours(), and_(_STAGES.c.id == self.id, _STAGES.c.state.in_(sorted(unclaimed)))))
                .values(state=StageState.SKIPPED, finished_at=now, lease_until=None, result={"reason": reason})
            )
            if done.rowcount != 1:
                raise self._refusal(connection, StageState.SKIPPED)

    def working(self) -> Working:
        """Heartbeats in the background while the body of the `with` runs; a body that raises fails the stage."""
        if self._owner is None:
            raise TransitionError(f"stage {self.name!r} of round {self.round_id!r} is not claimed; call claim() first")
        return Working(self, self._lease.total_seconds() / 3)

    def _ours(self) -> Any:
        # An owner's name is part of one claim only, unless the caller reuses names; state guards the rest.
        return and_(_STAGES.c.id == self.id, _STAGES.c.state == StageState.RUNNING, _STAGES.c.owner == self._owner)

    def _end(self, state: StageState, values: Mapping[str, Any]) -> None:
        with self._write() as connection:
            now = database_time(connection)
            times = select(_STAGES.c.started_at, _STAGES.c.seconds).where(self._ours())
            found = connection.execute(times).one_or_none()
            if found is None:
                raise self._refusal(connection, state)
            started, before = found
            ended = connection.execute(
                update(_STAGES)
                .where(self._ours())
                .values(
                    state=state,
                    finished_at=now,
                    lease_until=None,
                    seconds=(before or 0.0) + _between(started, now),
                    **values,
                )
            )
            if ended.rowcount != 1:
                raise self._refusal(connection, state)

    def _row(self, connection: Connection) -> StageRow:
        found = connection.execute(select(_STAGES).where(_STAGES.c.id == self.id)).mappings().one()
        return row_from(StageRow, dict(found))

    def _refusal(self, connection: Connection, state: StageState) -> TransitionError:
        row = self._row(connection)
        return TransitionError(
            f"stage {self.name!r} of round {self.round_id!r} cannot become {state!s} by {self._owner or 'no owner'}: "
            f"it is {str(row.state)!r}, owner {row.owner!r}, attempt {row.attempt}; claim it, stop when it is lost"
        )


def seconds_spent(row: StageRow) -> float | None:
    """Seconds of a stage's attempts so far; of one whose process died, up to its last heartbeat."""
    if row.state != StageState.RUNNING or row.started_at is None or row.heartbeat_at is None:
        return row.seconds
    return (row.seconds or 0.0) + _between(row.started_at, row.heartbeat_at)


def _between(began: datetime, until: datetime) -> float:
    """The seconds between two moments; none where the clock was set back meanwhile: work does not give time back."""
    return max(0.0, (until - began).total_seconds())


class Working:
    """Context manager of `Stage.working`. A heartbeat that cannot be stored is tried again at the next beat; what it
    raised is kept in `failure`, and the lease decides in the end; so it does for a body that raised with the store
    away."""

    def __init__(self, stage: Stage, every: float) -> None:
        self.failure: StoreError | None = None
        self._stage = stage
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat {stage.name}", daemon=True)

    def __enter__(self) -> Working:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            return
        try:
            if self._stage.heartbeat():
                self._stage.fail(f"{type(error).__name__}: {error}")
        except StoreError as failure:  # what ended the work is worth more; the lease decides
            self.failure = failure

    def _beat(self) -> None:
        while not self._stop.wait(self._every):
            try:
                if not self._stage.heartbeat():
                    return
            except StoreError as failure:
                self.failure = failure


class Presence:
    """A process that has a round open says that it lives, until `close`, whatever it waits for meanwhile. It is a row
    of `stages` that is no stage's, has neither begin nor seconds, and goes with its process: when that dies, its lease
    runs out, and the next process of the round takes the row away. `shown` is where else the process is seen at work
    (its run in Prefect), kept as the row's result: such a row stays for `KEPT_SECONDS`, or until somebody has said
    there that the process died (`presence_told`)."""

    def __init__(
        self, write: Door, round_id: str, owner: str, lease_seconds: float, shown: Mapping[str, str] | None = None
    ) -> None:
        self._write, self.round_id, self.owner, self._shown = write, round_id, owner, shown
        self._lease, self._name = timedelta(seconds=lease_seconds), PROCESS + owner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"presence {owner}", daemon=True)

    def begin(self) -> None:
        """Say it from now on, in the background."""
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Say it once: it holds for the lease. What processes that died have left of the round is taken away."""
        mine = {"id": row_id(self.round_id, self._name), "round_id": self.round_id, "name": self._name}
        with self._write() as connection:
            now = database_time(connection)
            row = mine | {"state": StageState.RUNNING, "owner": self.owner}
            insert_rows(connection, _STAGES, [row | ({} if self._shown is None else {"result": dict(self._shown)})])
            values = {"heartbeat_at": now, "lease_until": now + self._lease}
            connection.execute(update(_STAGES).where(_STAGES.c.id == mine["id"]).values(**values))
            of_round = and_(_STAGES.c.round_id == self.round_id, _STAGES.c.name.startswith(PROCESS))
            old = now - timedelta(seconds=KEPT_SECONDS)
            gone = or_(and_(_STAGES.c.lease_until < now, _STAGES.c.result.is_(null())), _STAGES.c.lease_until < old)
            connection.execute(delete(_STAGES).where(of_round, gone))

    def close(self) -> None:
        """Say it no more. Where the store fails the lease runs out instead."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        with suppress(StoreError), self._write() as connection:
            connection.execute(delete(_STAGES).where(_STAGES.c.id == row_id(self.round_id, self._name)))

    def _beat(self) -> None:
        while not self._stop.wait(self._lease.total_seconds() / 3):
            with suppress(StoreError):  # it is tried again, and the lease decides in the end
                self.beat()
