"""The store: the one door to the database. A stage asks what is owed, does it, and stores it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Connection, RowMapping, and_, func, select, update

from db import queries, writes
from db.copies import check_there
from db.engine import Engines, database_time, lock_writers, make_engines, parse_url, show, speaking
from db.ledger import Presence, Stage, owner_name
from db.migrate import ensure_schema
from db.rows import Round, Row, StageRow, TrajectoryRow, Written
from db.rows.contract import AnyRow
from db.schema import TABLES
from db.shards import Shards
from db.values.ids import row_id
from db.values.states import (
    AdapterState,
    EnvironmentState,
    ReleaseState,
    RoundState,
    StageState,
    is_final,
    parse_state,
)
from db.values.text import dump_json, encodable
from errors import StoreError

if TYPE_CHECKING:
    import pandas as pd

_ROUNDS = TABLES["rounds"]


class Store:
    """Reads and writes of one database. Safe to share between threads; a forked child gets connections of its own.

    Every method raises `StoreError` (what, the URL without password, what to do) when the database fails.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._pid = os.getpid()

    @property
    def url(self) -> str:
        """The URL without its password."""
        return show(self._engines.url)

    def close(self) -> None:
        """Let go of all connections."""
        self._engines.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One writing transaction, all or nothing; reading and then writing in it loses no update of others."""
        self._after_fork()
        with speaking(self._engines.url), encodable(), self._engines.write.begin() as connection:
            lock_writers(connection)
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        self._after_fork()
        with speaking(self._engines.url), encodable(), self._engines.write.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        self._after_fork()
        with speaking(self._engines.url), encodable(), self._engines.read.connect() as connection:
            yield connection

    def _after_fork(self) -> None:
        if os.getpid() != self._pid:
            self._engines.dispose(close=False)
            self._pid = os.getpid()

    # Rounds

    def start_round(
        self,
        target: str,
        data_hash: str,
        seed: int,
        profile: str,
        config: Mapping[str, Any],
        code_version: str = "",
        parent_id: str | None = None,
        join: bool = False,
        begun: Callable[[Round], object] = lambda row: None,
    ) -> Round:
        """A new running round with the next number; `parent_id` is the release that it goes on from. With `join` it is
        the one of the same settings, data and parent, where another process has begun that since it was looked for.
        `begun` is called with a new one before any other process can know of it."""
        with self._write() as connection:
            lock_writers(connection)
            for found in self._unfinished(connection, target, seed, profile, config) if join else ():
                if (found["data_hash"], found["parent_id"]) == (data_hash, parent_id):
                    return self._running(connection, found["id"])
            number = connection.execute(select(func.coalesce(func.max(_ROUNDS.c.number), 0) + 1)).scalar_one()
            row = Round(
                id=row_id("round", number, target, data_hash, seed, profile),
                number=number,
                parent_id=parent_id,
                target=target,
                data_hash=data_hash,
                seed=seed,
                profile=profile,
                config=config,
                state=RoundState.RUNNING,
                code_version=code_version,
                started_at=database_time(connection),
            )
            writes.put_rows(connection, [row], replace=False)
            begun(row)
            return self._round(connection, row.id)

    def open_round(self, target: str, seed: int, profile: str, config: Mapping[str, Any]) -> Round | None:
        """The newest unfinished round of exactly these settings, to resume (an interrupted one runs again), or None."""
        with self._write() as connection:
            for found in self._unfinished(connection, target, seed, profile, config):
                return self._running(connection, found["id"])
        return None

    def _running(self, connection: Connection, round_id: str) -> Round:
        connection.execute(update(_ROUNDS).where(_ROUNDS.c.id == round_id).values(state=RoundState.RUNNING))
        return self._round(connection, round_id)

    def _unfinished(
        self, connection: Connection, target: str, seed: int, profile: str, config: Mapping[str, Any]
    ) -> list[RowMapping]:
        """The rounds of exactly these settings that are not over, newest first, kept as they are until the end of the
        transaction: one that ends meanwhile has ended, and is not made to run again."""
        open_states = [state for state in RoundState if not is_final(state)]
        same = and_(_ROUNDS.c.target == target, _ROUNDS.c.seed == seed, _ROUNDS.c.profile == profile)
        query = select(_ROUNDS).where(same, _ROUNDS.c.state.in_(open_states)).order_by(_ROUNDS.c.number.desc())
        wanted = dump_json(_sorted(config))
        found = connection.execute(query.with_for_update()).mappings()
        return [row for row in found if dump_json(_sorted(row["config"])) == wanted]

    def latest_round(self, target: str | None = None) -> Round | None:
        """The round with the highest number (of a target)."""
        with self._read() as connection:
            return queries.round_where(connection, *(() if target is None else (_ROUNDS.c.target == target,)))

    def round(self, round_id: str) -> Round:
        """A round by id; `StoreError` when there is none."""
        with self._read() as connection:
            return self._round(connection, round_id)

    def finish_round(self, round_id: str, state: RoundState, reason: str = "", peak_gib: float | None = None) -> Round:
        """End a round (done, failed, cancelled) or mark it interrupted. `seconds` counts from its start; of several
        processes' `peak_gib` the highest is kept."""
        with self._write() as connection:
            now, row = database_time(connection), self._round(connection, round_id)
            peaks = [peak for peak in (row.peak_gib, peak_gib) if peak is not None]
            values: dict[str, Any] = {
                "reason": reason,
                "peak_gib": max(peaks, default=None),
                "seconds": max(0.0, (now - row.started_at).total_seconds()),  # a clock may be set back
            }
            if is_final(state):
                values["finished_at"] = now
            writes.move_row(connection, Round, round_id, state, values)
            return self._round(connection, round_id)

    def _round(self, connection: Connection, round_id: str) -> Round:
        found = queries.round_where(connection, _ROUNDS.c.id == round_id)
        if found is None:
            raise StoreError(f"there is no round {round_id!r} in {self.url!r}; start one, or check the id")
        return found

    # Stages

    def stage(self, round_id: str, name: str) -> Stage:
        """The handle of a stage; its row is made (pending) when it is not there yet."""
        return Stage(self._write, self._read, round_id, name)

    def presence(self, round_id: str, lease_seconds: float, shown: Mapping[str, str] | None = None) -> Presence:
        """This process's presence in a round, which it has open; it begins with `begin`. `shown`: where else it is seen
        at work, for whoever finds that it died."""
        return Presence(self._write, round_id, owner_name(), lease_seconds, shown)

    def presence_told(self, row_id: str) -> None:
        """Where this row of `presences` was shown at work, it is shown as ended now."""
        table = TABLES[StageRow.TABLE]
        with self._write() as connection:
            connection.execute(update(table).where(table.c.id == row_id).values(result=None))

    def shards(self, round_id: str) -> Shards:
        """The ledger of a round's shards."""
        return Shards(self._write, self._read, round_id)

    def reopen_stages(self, round_id: str, names: Sequence[str]) -> None:
        """Owe these stages of a round again: what they stored as their result is forgotten. The time that they took is
        not: limits and histories count it."""
        table = TABLES[StageRow.TABLE]
        kept = ("id", "round_id", "name", "seconds", "attempt")
        forgotten = {column.name: None for column in table.columns if column.name not in kept}
        with self._write() as connection:
            owed = update(table).where(table.c.round_id == round_id, table.c.name.in_(list(names)))
            connection.execute(owed.values(**forgotten | {"state": StageState.PENDING}))

    # Trajectories

    def add_trajectories(self, rows: Sequence[TrajectoryRow]) -> Written:
        """Store trajectories with their steps and checks in one transaction. What is there already stays, except that
        an error row (and only that) is replaced, by a success or by an error of another round."""
        with self._write() as connection:
            return writes.add_trajectories(connection, rows)

    def stored_ids(self, ids: Iterable[str]) -> set[str]:
        """Those of `ids` that are stored without an infrastructure error; the others are owed."""
        with self._read() as connection:
            return {found for part in writes.chunks(ids) for found in queries.stored_ids(connection, part)}

    def trajectory(self, trajectory_id: str) -> TrajectoryRow:
        """One trajectory whole: steps, checks and arrays; `StoreError` when there is none."""
        for found in self.trajectories(with_blobs=True, id=trajectory_id):
            return found
        raise StoreError(f"there is no trajectory {trajectory_id!r} in {self.url!r}; check the id")

    def trajectories(
        self, round_id: str | None = None, *, with_blobs: bool = False, **equals: Any
    ) -> Iterator[TrajectoryRow]:
        """Trajectories with steps and checks, one after another, ordered by id. `equals` are columns, as in `rows`."""
        with self._read() as connection:
            yield from queries.trajectories(connection, _of_round(round_id, equals), with_blobs)

    def trajectory_frame(
        self,
        round_id: str | None = None,
        *,
        with_blobs: bool = False,
        columns: Sequence[str] | None = None,
        **equals: Any,
    ) -> pd.DataFrame:
        """One row a trajectory (no messages), error rows included: leave them out with `error_boundary=None`. `columns`
        names those that are wanted: three of a million trajectories take a tenth of the memory of all."""
        with self._read() as connection:
            return queries.trajectory_frame(connection, _of_round(round_id, equals), with_blobs, columns)

    def check_frame(self, round_id: str | None = None, **equals: Any) -> pd.DataFrame:
        """One row a check of the trajectories without infrastructure error; `equals` are columns of trajectories."""
        with self._read() as connection:
            return queries.check_frame(connection, _of_round(round_id, equals))

    def check_frames(
        self, round_id: str | None = None, *, columns: Sequence[str] | None = None, **equals: Any
    ) -> Iterator[pd.DataFrame]:
        """The rows of `check_frame` in frames one after another, for more checks than fit in memory: the columns of
        `checks` alone, all or those named, in no order."""
        with self._read() as connection:
            yield from queries.check_frames(connection, _of_round(round_id, equals), columns)

    def step_frame(self, round_id: str | None = None, **equals: Any) -> pd.DataFrame:
        """One row a step; `equals` are columns of trajectories."""
        with self._read() as connection:
            return queries.step_frame(connection, _of_round(round_id, equals))

    # All other tables, by the dataclass of their rows

    def put(self, rows: Sequence[Row], /, *, replace: bool = False) -> None:
        """Insert rows in one transaction. A row whose key is there stays as it is, or with `replace` takes over every
        column but `created_at` (a state only along the transition table)."""
        with self._write() as connection:
            writes.put_rows(connection, rows, replace)

    def rows(self, kind: type[AnyRow], /, **equals: Any) -> list[AnyRow]:
        """Rows of a table, ordered by key. `equals` are columns: None means IS NULL; a list, tuple or set means
        IN, of however many values. Of `stages` these are stages alone, without the processes of `presences`."""
        with self._read() as connection:
            return queries.rows(connection, kind, equals)

    def presences(self, **equals: Any) -> list[StageRow]:
        """Processes that have a round open, and those that had it open when they died, as rows of `stages`."""
        with self._read() as connection:
            return queries.presences(connection, equals)

    def held(self, **equals: Any) -> list[StageRow]:
        """Rows of `stages` whose lease holds now: stages that are worked on, and processes that have a round open."""
        with self._read() as connection:
            return queries.held(connection, equals)

    def worked(self, without: str = "") -> dict[str, float]:
        """Seconds of all stages of each round, by its id; `without` the stage of that name."""
        with self._read() as connection:
            return queries.worked(connection, without)

    def row(self, kind: type[AnyRow], /, **equals: Any) -> AnyRow | None:
        """The one row with these values, or None; `StoreError` when there are several."""
        found = self.rows(kind, **equals)
        if len(found) > 1:
            raise StoreError(f"{len(found)} rows of {kind.TABLE!r} have {equals}; give the whole key")
        return found[0] if found else None

    def set_state(
        self,
        kind: type[Row],
        row_id: str,
        state: RoundState | EnvironmentState | AdapterState | ReleaseState,
        /,
        **values: Any,
    ) -> None:
        """Move a round, synthesized environment, adapter or release to `state`, with further columns. The same state
        again is allowed; anything that the transition table does not allow raises `TransitionError`."""
        if kind is StageRow:
            raise StoreError("stages move through their ledger: use store.stage(round_id, name)")
        with self._write() as connection:
            writes.move_row(connection, kind, row_id, parse_state(kind.TABLE, state), values)

    def forget_conversations(self, before: datetime, count_only: bool = False) -> tuple[int, int]:
        """Remove users' conversations that nobody has spoken in, or of, since `before`. What was said of one stays as a
        figure: of those with a success or failure only the words go (messages, names of tools, comment, the name).
        How many were removed, and how many lost their words; with `count_only` would be."""
        with self._write() as connection:
            return writes.forget_conversations(connection, before, count_only)

    def row_beginning(self, key: str) -> tuple[str, dict[str, Any]] | None:
        """Table and columns of the round with the number `key`, else of the round, trajectory, adapter, environment,
        capability, evaluation or release whose id begins with `key`; None when there is none, or several in each of
        these tables."""
        with self._read() as connection:
            return queries.row_beginning(connection, key)

    def spent(self, round_id: str | None = None, **equals: Any) -> dict[str, float]:
        """Sums of calls, prompt_tokens, sampled_tokens, dollars and seconds."""
        with self._read() as connection:
            return queries.spent(connection, _of_round(round_id, equals))

    def query(self, sql: str, **values: Any) -> pd.DataFrame:
        """A SELECT of your own, with `:name` parameters, on connections that cannot write."""
        with self._read() as connection:
            return queries.sql(connection, sql, values)


def open_store(url: str) -> Store:
    """Open a database of the newest schema: made if it is not there, and a SQLite file is brought to it. Several
    processes may do so at once.
    Raises `ConfigurationError` for a URL that cannot work and `StoreError` for a database that does not."""
    engines = make_engines(parse_url(url))
    try:
        ensure_schema(engines)
    except StoreError:
        engines.dispose()
        raise
    return Store(engines)


def open_stored(url: str) -> Store:
    """`open_store` for commands about what is stored already. Raises `NoHome` for a SQLite file that is not there, and
    makes none."""
    check_there(url)
    return open_store(url)


def _of_round(round_id: str | None, equals: Mapping[str, Any]) -> dict[str, Any]:
    return dict(equals) if round_id is None else {"round_id": round_id, **equals}


def _sorted(value: Any) -> Any:
    """A JSON value with sorted keys and lists for tuples, as it comes back from a database."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value
