"""The statements behind the store's writes: idempotent inserts, per dialect, as Core executemany.

The ORM's unit of work is five times slower here and not used. Every function works in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, bindparam, delete, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from db.engine import lock_writers
from db.rows import SMALL_TABLES, ReleaseRow, Row, StageRow, TrajectoryRow, Written, values_of
from db.rows.trajectories import check_values, step_values, trajectory_values
from db.schema import TABLES
from db.values.states import STATES_OF, check_transition, parse_state
from db.values.text import clean_value, dump_json
from errors import StoreError

# SQLite allows 32,766 parameters in a statement, PostgreSQL 65,535.
CHUNK = 5000
# When a row was first written: a row that is replaced keeps it.
WRITTEN_ONCE = frozenset({"created_at"})
# All that may change in a release beside its state.
RELEASE_CHANGES = frozenset({"reason", "evidence", "live_at", "ended_at"})


def chunks(ids: Iterable[str]) -> Iterable[list[str]]:
    """`ids` in lists that fit one IN clause."""
    given = list(ids)
    for start in range(0, len(given), CHUNK):
        yield given[start : start + CHUNK]


def insert_rows(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    replace: bool = False,
    kept: Collection[str] = (),
) -> None:
    """Insert rows that all have the same keys; on a row with the same primary key do nothing, or with `replace` take
    over the given columns except those `kept`."""
    if not rows:
        return
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(table)
    key = [column.name for column in table.primary_key]
    changed = [name for name in rows[0] if name not in key and name not in kept]
    if replace and changed:
        statement = statement.on_conflict_do_update(
            index_elements=key, set_={name: statement.excluded[name] for name in changed}
        )
    elif table.name == "stages":
        # Their id is a hash of round and name, which are unique too. Of two processes that insert a stage at once,
        # PostgreSQL may notice the second constraint first, and a conflict target covers only the one it names.
        statement = statement.on_conflict_do_nothing()
    else:
        statement = statement.on_conflict_do_nothing(index_elements=key)
    connection.execute(statement, list(rows))


def insert_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that are known to be new, with values that the driver takes as they are (JSON written out,
    moments as the database keeps them). SQLAlchemy's work on a value costs as much as the insert."""
    if not rows:
        return
    names = ", ".join(rows[0])
    if connection.dialect.name != "postgresql":
        marks = ", ".join("?" * len(rows[0]))
        values = [tuple(row.values()) for row in rows]
        connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", values)
        return
    driver: Any = connection.dialect.loaded_dbapi
    statement = f"COPY {table.name} ({names}) FROM STDIN"
    try:
        cursor: Any = connection.connection.cursor()
        with cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(tuple(row.values()))
    except driver.Error as error:
        # SQLAlchemy does not know of COPY, so its wrapping of the driver's errors is asked for.
        raise DBAPIError.instance(statement, None, error, driver.Error, hide_parameters=True) from error


def put_rows(connection: Connection, rows: Sequence[Row], replace: bool) -> None:
    """`Store.put` inside a transaction."""
    for kind in dict.fromkeys(map(type, rows)):
        table = table_of(kind)
        if kind is StageRow:
            raise StoreError(f"rows of {kind.TABLE!r} are written by stage(), which keeps their rules")
        group = [values_of(row) for row in rows if type(row) is kind]
        for values in group:
            missing = [column.name for column in table.primary_key if values[column.name] is None]
            if missing:
                raise StoreError(f"a row for table {table.name!r} lacks {missing}; every row needs its whole key")
        if table.name in STATES_OF:
            check_states(connection, table, group, replace)
        if kind is ReleaseRow and replace:
            check_releases(connection, group)
        insert_rows(connection, table, group, replace, WRITTEN_ONCE)


def forget_conversations(connection: Connection, before: datetime, count_only: bool = False) -> tuple[int, int]:
    """`Store.forget_conversations` inside a transaction."""
    table = TABLES["conversations"]
    old = and_(table.c.updated_at < before, or_(table.c.feedback_at.is_(None), table.c.feedback_at < before))
    silent = and_(old, table.c.success.is_(None))
    # Its name goes with the words, so one without has lost them already; a comment may be made later.
    said = and_(old, table.c.success.is_not(None), or_(table.c.conversation != "", table.c.comment != ""))
    if count_only:
        rows = select(func.count()).select_from(table)
        return int(connection.execute(rows.where(silent)).scalar_one()), int(
            connection.execute(rows.where(said)).scalar_one()
        )
    if connection.dialect.name == "sqlite":  # which else keeps the words in pages that it may use again
        connection.exec_driver_sql("PRAGMA secure_delete = ON")
    gone = connection.execute(delete(table).where(silent)).rowcount
    nothing: dict[str, Any] = {"conversation": "", "messages": [], "tools": [], "comment": ""}
    return gone, connection.execute(update(table).where(said).values(nothing)).rowcount


def move_row(connection: Connection, kind: type[Row], key: str, state: str, values: Mapping[str, Any]) -> None:
    """`Store.set_state` inside a transaction."""
    lock_writers(connection)
    table = table_of(kind)
    if kind is ReleaseRow:
        _check_release_changes(key, values)
    present = connection.execute(select(table.c.state).where(table.c.id == key)).scalar_one_or_none()
    if present is None:
        raise StoreError(f"there is no row {key!r} in {table.name!r}; store it before its state moves")
    check_transition(table.name, key, present, state)
    cleaned = {name: clean_value(value, "column", name, "of", table.name) for name, value in values.items()}
    moved = connection.execute(
        update(table).where(table.c.id == key, table.c.state == present).values(state=state, **cleaned)
    )
    if moved.rowcount != 1:
        raise StoreError(f"{table.name} row {key!r} left {present!r} while it was being moved; run the command again")


def check_states(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], replace: bool) -> None:
    """Refuse states that the table does not know and, with `replace`, moves that it does not allow."""
    for row in rows:
        if "state" in row:
            parse_state(table.name, row["state"])
    if not replace:
        return
    lock_writers(connection)
    wanted = {row["id"]: row["state"] for row in rows if "state" in row}
    for ids in chunks(wanted):
        for found in connection.execute(select(table.c.id, table.c.state).where(table.c.id.in_(ids))):
            check_transition(table.name, found.id, found.state, wanted[found.id])


def check_releases(connection: Connection, wanted: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to change more of a stored release than its state and what is said about it."""
    table = table_of(ReleaseRow)
    for values in wanted:
        found = connection.execute(select(table).where(table.c.id == values["id"])).mappings().one_or_none()
        if found is not None:
            _check_release_changes(values["id"], {n for n in found if found[n] != values[n]} - {"state"})


def _check_release_changes(key: str, changed: Collection[str]) -> None:
    fixed = sorted(set(changed) - RELEASE_CHANGES)
    if fixed:
        raise StoreError(f"release {key!r}: {fixed} never change; make another release")


def add_trajectories(connection: Connection, rows: Sequence[TrajectoryRow]) -> Written:
    """`Store.add_trajectories` inside a transaction."""
    wanted: dict[str, TrajectoryRow] = {}
    for row in rows:
        present = wanted.get(row.id)
        if present is None or (present.error_boundary is not None and row.error_boundary is None):
            wanted[row.id] = row
    trajectories, steps, checks = TABLES["trajectories"], TABLES["steps"], TABLES["checks"]
    # Between the look and the insert no one else may add the same trajectory: its steps would be mixed with ours.
    lock_writers(connection)
    stored: set[str] = set()
    lost: dict[str, str | None] = {}  # the round of an error row
    for ids in chunks(wanted):
        columns = trajectories.c.id, trajectories.c.error_boundary, trajectories.c.round_id
        for found in connection.execute(select(*columns).where(trajectories.c.id.in_(ids))):
            stored.add(found.id)
            if found.error_boundary is not None:
                lost[found.id] = found.round_id
    new = [row for row in wanted.values() if row.id not in stored]
    # The error of an earlier round gives way to another one too: the round that lost the episode again counts it.
    better = [
        row
        for row in wanted.values()
        if row.id in lost and (row.error_boundary is None or lost[row.id] != row.round_id)
    ]
    if better:
        gone = [{"gone": row.id} for row in better]
        for table in (checks, steps):
            connection.execute(delete(table).where(table.c.trajectory_id == bindparam("gone")), gone)
        insert_rows(connection, trajectories, [trajectory_values(row) for row in better], replace=True)
    insert_new(connection, trajectories, _written_out(connection, [trajectory_values(row) for row in new]))
    insert_new(connection, steps, [values for row in (*new, *better) for values in step_values(row)])
    insert_new(connection, checks, [values for row in (*new, *better) for values in check_values(row)])
    return Written(len(new), len(better), len(rows) - len(new) - len(better))


def _written_out(connection: Connection, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The columns of trajectories, ready for `insert_new`."""
    as_kept = TABLES["trajectories"].c.created_at.type.bind_processor(connection.dialect) or (lambda moment: moment)
    return [
        row
        | {name: dump_json(row[name]) for name in ("metrics", "messages")}
        | {"created_at": as_kept(row["created_at"])}
        for row in rows
    ]


def table_of(kind: type[Row]) -> Table:
    """The table of a row class; `StoreError` for a class that is none of `SMALL_TABLES`."""
    if kind not in SMALL_TABLES:
        raise StoreError(
            f"{kind.__name__} is no row of a small table; there are {', '.join(k.__name__ for k in SMALL_TABLES)} "
            "(trajectories with their steps and checks: add_trajectories() and trajectories())"
        )
    return TABLES[kind.TABLE]


def where(table: Table, equals: Mapping[str, Any]) -> Any:
    """`column = value` for all pairs: None is IS NULL, a list, tuple or set is IN."""
    unknown = set(equals) - set(table.columns.keys())
    if unknown:
        raise StoreError(
            f"table {table.name!r} has no column {sorted(unknown)}; it has {', '.join(table.columns.keys())}"
        )
    conditions = []
    for name, value in equals.items():
        column = table.c[name]
        if isinstance(value, list | tuple | set | frozenset):
            conditions.append(column.in_(list(value)))
        else:
            conditions.append(column.is_(None) if value is None else column == value)
    return and_(True, *conditions)
