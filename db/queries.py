"""What is read: rows of small tables, trajectories whole or as a frame for analysis, and a user's own SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, func, not_, select, text

from db.engine import database_time
from db.rows import (
    PROCESS,
    AdapterRow,
    CapabilityRow,
    EnvironmentRow,
    EvaluationRow,
    ReleaseRow,
    Round,
    StageRow,
    TrajectoryRow,
    row_from,
)
from db.rows.contract import AnyRow
from db.rows.trajectories import BLOBS, trajectory_from
from db.schema import TABLES
from db.values.states import StageState
from db.writes import CHUNK, chunks, table_of, where
from errors import StoreError

# Pandas takes longer to import than everything else here together, and most processes only write.
if TYPE_CHECKING:
    import pandas as pd

_PAGE = 500
_ROWS = 50_000  # of a frame, while it is read
# What a number of a round may have of digits, as the column holds them.
_DIGITS = 9
_STAGES = TABLES[StageRow.TABLE]
# Rows of `stages` that are no stage's: processes that have a round open (`db.ledger.Presence`).
_PRESENCE = _STAGES.c.name.startswith(PROCESS)
# The tables whose rows a person looks up by id, in this order.
_BY_ID = (
    Round.TABLE,
    "trajectories",
    AdapterRow.TABLE,
    EnvironmentRow.TABLE,
    CapabilityRow.TABLE,
    EvaluationRow.TABLE,
    ReleaseRow.TABLE,
    StageRow.TABLE,
)


def rows(connection: Connection, kind: type[AnyRow], equals: Mapping[str, Any]) -> list[AnyRow]:
    """All rows of a small table with these values, ordered by key. Of `stages` these are stages alone: processes that
    have a round open are told by `presences`, and all that holds a lease by `held`."""
    return _rows(connection, kind, equals, *([not_(_PRESENCE)] if kind is StageRow else []))


def presences(connection: Connection, equals: Mapping[str, Any]) -> list[StageRow]:
    """The processes that have a round open, and those that had it open when they died, as rows of `stages`."""
    return _rows(connection, StageRow, equals, _PRESENCE)


def held(connection: Connection, equals: Mapping[str, Any]) -> list[StageRow]:
    """Rows of `stages` whose lease holds: stages that are worked on, and processes that have a round open."""
    now = database_time(connection)
    return _rows(connection, StageRow, {**equals, "state": StageState.RUNNING}, _STAGES.c.lease_until >= now)


def worked(connection: Connection, without: str = "") -> dict[str, float]:
    """Seconds of all stages of each round, by its id, `without` that of a name. Results hold thousands of ids: they are
    not read for a sum."""
    query = select(_STAGES.c.round_id, func.sum(_STAGES.c.seconds)).group_by(_STAGES.c.round_id)
    query = query.where(not_(_PRESENCE), _STAGES.c.name != without)
    return {round_id: float(seconds or 0.0) for round_id, seconds in connection.execute(query)}


def _rows(connection: Connection, kind: type[AnyRow], equals: Mapping[str, Any], *conditions: Any) -> list[AnyRow]:
    table = table_of(kind)
    found = [
        dict(row)
        for part in _parts(equals)
        for row in connection.execute(
            select(table).where(where(table, part), *conditions).order_by(*table.primary_key)
        ).mappings()
    ]
    if _long(equals):
        found.sort(key=lambda row: tuple(row[column.name] for column in table.primary_key))
    return [row_from(kind, row) for row in found]


def row_beginning(connection: Connection, key: str) -> tuple[str, dict[str, Any]] | None:
    """Table and columns, without blobs, of the round that has the number `key`, else of the row whose id begins with
    it, if a table has only one such row."""
    if key.isascii() and key.isdecimal() and len(key) <= _DIGITS:
        rounds = TABLES[Round.TABLE]
        numbered = connection.execute(select(rounds).where(rounds.c.number == int(key))).mappings().one_or_none()
        if numbered is not None:
            return rounds.name, dict(numbered)
    for name in _BY_ID:
        table = TABLES[name]
        # What begins with `key` follows it in the order of the key's index, which LIKE would not use: it looks at
        # every row. In an order that skips some characters a match might be missed; ids have letters and digits only.
        query = select(table).where(table.c.id >= key).order_by(table.c.id).limit(2)
        found = [row for row in connection.execute(query).mappings() if row["id"].startswith(key)]
        if len(found) == 1 or any(row["id"] == key for row in found):
            return name, {column: value for column, value in found[0].items() if not isinstance(value, bytes)}
    return None


def round_where(connection: Connection, *conditions: Any) -> Round | None:
    """The newest round that meets the conditions."""
    table = TABLES["rounds"]
    query = select(table).where(*conditions).order_by(table.c.number.desc()).limit(1)
    found = connection.execute(query).mappings().one_or_none()
    return None if found is None else row_from(Round, dict(found))


def trajectory_frame(
    connection: Connection, equals: Mapping[str, Any], with_blobs: bool, names: Sequence[str] | None = None
) -> pd.DataFrame:
    """One row a trajectory, without messages; `success` is a nullable boolean. Blobs are the stored bytes. `names` are
    the columns that are wanted, all of these when None."""
    table = TABLES["trajectories"]
    columns = [c for c in table.columns if c.name != "messages" and (with_blobs or c.name not in BLOBS)]
    order = _order(equals, "id")
    if names is not None:  # what several statements give has to be sorted by the id, wanted or not
        columns = [table.c[name] for name in dict.fromkeys((*names, *order))]
    kinds = {"success": "boolean", "reward": "float64"}
    parts = [
        frame.astype({name: kind for name, kind in kinds.items() if name in frame})
        for part in _parts(equals)
        for frame in _frames(connection, select(*columns).where(where(table, part)).order_by(table.c.id))
    ]
    joined = _joined(parts, order)
    return joined if names is None else joined[list(names)]


def check_frame(connection: Connection, equals: Mapping[str, Any]) -> pd.DataFrame:
    """One row a check of the trajectories that did not fail for infrastructure, with what they were about."""
    trajectories, checks = TABLES["trajectories"], TABLES["checks"]
    about = ("task_id", "family", "split", "seed", "trial", "policy_id", "adapter_id", "reward", "success")
    columns = (*checks.columns, *(trajectories.c[name] for name in about))
    parts = [
        frame.astype({"success": "boolean", "reward": "float64"})
        for part in _parts(equals)
        for frame in _frames(connection, _checks(columns, part).order_by(checks.c.trajectory_id, checks.c.idx))
    ]
    return _joined(parts, _order(equals, "trajectory_id", "idx"))


def check_frames(
    connection: Connection, equals: Mapping[str, Any], names: Sequence[str] | None = None
) -> Iterator[pd.DataFrame]:
    """The columns of `checks` (all, or those of `names`) as `check_frame` has them, in frames one after another and in
    no order."""
    trajectories, checks = TABLES["trajectories"], TABLES["checks"]
    columns = [checks.c[name] for name in names or checks.columns.keys()]
    wanted = [
        found
        for part in _parts(equals)
        for found in connection.execute(
            select(trajectories.c.id).where(where(trajectories, part), trajectories.c.error_boundary.is_(None))
        ).scalars()
    ]
    if len(wanted) <= CHUNK:
        query = select(*columns).where(checks.c.trajectory_id.in_(wanted))
        yield from _frames(connection, query)
        return
    # Of many trajectories the checks are read as they lie, and those of others left out here: to look each up by its
    # id goes through the whole file in no order.
    yield from _frames(connection, select(checks.c.trajectory_id.label("_of"), *columns), set(wanted))


def _checks(columns: Sequence[Any], equals: Mapping[str, Any]) -> Select[Any]:
    trajectories, checks = TABLES["trajectories"], TABLES["checks"]
    return (
        select(*columns)
        .join_from(checks, trajectories, trajectories.c.id == checks.c.trajectory_id)
        .where(where(trajectories, equals), trajectories.c.error_boundary.is_(None))
    )


def step_frame(connection: Connection, equals: Mapping[str, Any]) -> pd.DataFrame:
    """One row a step of these trajectories."""
    trajectories, steps = TABLES["trajectories"], TABLES["steps"]
    of = select(steps).join(trajectories, trajectories.c.id == steps.c.trajectory_id)
    parts = [
        frame
        for part in _parts(equals)
        for frame in _frames(
            connection, of.where(where(trajectories, part)).order_by(steps.c.trajectory_id, steps.c.idx)
        )
    ]
    return _joined(parts, _order(equals, "trajectory_id", "idx"))


def trajectories(connection: Connection, equals: Mapping[str, Any], with_blobs: bool) -> Iterator[TrajectoryRow]:
    """Trajectories with steps and checks, in pages by id, so that memory stays flat however many there are."""
    table = TABLES["trajectories"]
    columns = [c for c in table.columns if with_blobs or c.name not in BLOBS]
    # All ids first: to find the next page by its id and the conditions, a database sorts what they leave each time.
    ids = [
        found
        for part in _parts(equals)
        for found in connection.execute(select(table.c.id).where(where(table, part)).order_by(table.c.id)).scalars()
    ]
    if _long(equals):
        ids.sort()
    for start in range(0, len(ids), _PAGE):
        wanted = ids[start : start + _PAGE]
        query = select(*columns).where(table.c.id.in_(wanted)).order_by(table.c.id)
        page = connection.execute(query).mappings().all()
        steps, checks = (_children(connection, name, wanted) for name in ("steps", "checks"))
        for found in page:
            yield trajectory_from(dict(found), steps.get(found["id"], []), checks.get(found["id"], []))


def stored_ids(connection: Connection, ids: list[str]) -> set[str]:
    """Those of `ids` that are stored without an infrastructure error."""
    table = TABLES["trajectories"]
    query = select(table.c.id).where(table.c.id.in_(ids), table.c.error_boundary.is_(None))
    return set(connection.execute(query).scalars())


def spent(connection: Connection, equals: Mapping[str, Any]) -> dict[str, float]:
    """Sums of `spend`: calls, prompt_tokens, sampled_tokens, dollars, seconds."""
    table = TABLES["spend"]
    names = ("calls", "prompt_tokens", "sampled_tokens", "dollars", "seconds")
    query = select(*(func.coalesce(func.sum(table.c[n]), 0).label(n) for n in names)).where(where(table, equals))
    found = connection.execute(query).mappings().one()
    return {name: float(found[name]) for name in names}


def sql(connection: Connection, query: str, values: Mapping[str, Any]) -> pd.DataFrame:
    """A user's own SELECT with `:name` parameters."""
    result = connection.execute(text(query), dict(values))
    if not result.returns_rows:
        raise StoreError(f"query {query.strip()[:80]!r} returns no rows; write a SELECT")
    return _joined([_data_frame(result.all(), list(result.keys()))], [])


def _frames(connection: Connection, query: Select[Any], of: AbstractSet[str] | None = None) -> Iterator[pd.DataFrame]:
    """A query's rows as frames of `_ROWS`, one at least. Rows as Python objects take ten times a frame's place, so they
    are never all there at once. With `of` the first column is left out, and so are rows where it is none of those."""
    result = connection.execute(query.execution_options(yield_per=_ROWS))
    names = list(result.keys())[0 if of is None else 1 :]
    found = False
    for part in result.partitions():
        rows = part if of is None else [row[1:] for row in part if row[0] in of]
        if rows:
            found = True
            yield _data_frame(rows, names)
    if not found:
        yield _data_frame([], names)


def _data_frame(rows: Sequence[Any], names: list[str]) -> pd.DataFrame:
    import pandas as pd

    # As plain tuples: pandas asks each of SQLAlchemy's rows what it is, which costs more than to read it.
    return pd.DataFrame(list(map(tuple, rows)), columns=names)


def _joined(parts: list[pd.DataFrame], order: list[str]) -> pd.DataFrame:
    """Frames of several statements as one, in order."""
    import pandas as pd

    joined = parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)
    return joined.sort_values(order, ignore_index=True) if order else joined


def _order(equals: Mapping[str, Any], *columns: str) -> list[str]:
    """What to sort by: nothing where one statement did it already."""
    return list(columns) if _long(equals) else []


def _long(equals: Mapping[str, Any]) -> str | None:
    """A column with more values than go into one statement."""
    lists = (name for name, values in equals.items() if isinstance(values, list | tuple | set | frozenset))
    return next((name for name in lists if len(equals[name]) > CHUNK), None)


def _parts(equals: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The conditions, with long lists of values in parts that fit one statement."""
    name = _long(equals)
    if name is None:
        yield dict(equals)
        return
    for part in chunks(dict.fromkeys(equals[name])):
        yield from _parts({**equals, name: part})


def _children(connection: Connection, name: str, ids: list[str]) -> dict[str, list[Mapping[str, Any]]]:
    table = TABLES[name]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in connection.execute(select(table).where(table.c.trajectory_id.in_(ids))).mappings():
        found.setdefault(row["trajectory_id"], []).append(dict(row))
    return found
