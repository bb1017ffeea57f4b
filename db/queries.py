"""What is read: rows of small tables, trajectories whole or as a frame for analysis, and a user's own SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, CursorResult, Select, Table, func, select, text

from db.rows import AdapterRow, CapabilityRow, EnvironmentRow, EvaluationRow, ReleaseRow, Round, TrajectoryRow, row_from
from db.rows.contract import AnyRow
from db.rows.trajectories import BLOBS, trajectory_from
from db.schema import TABLES
from db.writes import table_of, where
from errors import StoreError

# Pandas takes longer to import than everything else here together, and most processes only write.
if TYPE_CHECKING:
    import pandas as pd

_PAGE = 500
# The tables whose rows a person looks up by id, in this order.
_BY_ID = (
    Round.TABLE,
    "trajectories",
    AdapterRow.TABLE,
    EnvironmentRow.TABLE,
    CapabilityRow.TABLE,
    EvaluationRow.TABLE,
    ReleaseRow.TABLE,
)


def rows(connection: Connection, kind: type[AnyRow], equals: Mapping[str, Any]) -> list[AnyRow]:
    """All rows of a small table with these values, ordered by key."""
    return [row_from(kind, values) for values in stored_values(connection, table_of(kind), equals)]


def stored_values(connection: Connection, table: Table, equals: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The columns of all rows of a table with these values, ordered by key."""
    query = select(table).where(where(table, equals)).order_by(*table.primary_key)
    return [dict(found) for found in connection.execute(query).mappings()]


def row_beginning(connection: Connection, key: str) -> tuple[str, dict[str, Any]] | None:
    """Table and columns, without blobs, of the row whose id begins with `key`, if a table has only one such row."""
    for name in _BY_ID:
        table = TABLES[name]
        found = connection.execute(select(table).where(table.c.id.like(f"{key}%")).limit(2)).mappings().all()
        if len(found) == 1:
            return name, {column: value for column, value in found[0].items() if not isinstance(value, bytes)}
    return None


def round_where(connection: Connection, *conditions: Any) -> Round | None:
    """The newest round that meets the conditions."""
    table = TABLES["rounds"]
    query = select(table).where(*conditions).order_by(table.c.number.desc()).limit(1)
    found = connection.execute(query).mappings().one_or_none()
    return None if found is None else row_from(Round, dict(found))


def trajectory_frame(connection: Connection, equals: Mapping[str, Any], with_blobs: bool) -> pd.DataFrame:
    """One row a trajectory, without messages; `success` is a nullable boolean. Blobs are the stored bytes."""
    table = TABLES["trajectories"]
    columns = [c for c in table.columns if c.name != "messages" and (with_blobs or c.name not in BLOBS)]
    frame = _frame(connection, select(*columns).where(where(table, equals)).order_by(table.c.id))
    return frame.astype({"success": "boolean", "reward": "float64"})


def check_frame(connection: Connection, equals: Mapping[str, Any]) -> pd.DataFrame:
    """One row a check of the trajectories that did not fail for infrastructure, with what they were about."""
    trajectories, checks = TABLES["trajectories"], TABLES["checks"]
    about = [
        trajectories.c[name] for name in ("task_id", "family", "split", "seed", "trial", "policy_id", "adapter_id")
    ]
    query = (
        select(checks, *about, trajectories.c.reward, trajectories.c.success)
        .join(trajectories, trajectories.c.id == checks.c.trajectory_id)
        .where(where(trajectories, equals), trajectories.c.error_boundary.is_(None))
        .order_by(checks.c.trajectory_id, checks.c.idx)
    )
    return _frame(connection, query).astype({"success": "boolean", "reward": "float64"})


def step_frame(connection: Connection, equals: Mapping[str, Any]) -> pd.DataFrame:
    """One row a step of these trajectories."""
    trajectories, steps = TABLES["trajectories"], TABLES["steps"]
    query = (
        select(steps)
        .join(trajectories, trajectories.c.id == steps.c.trajectory_id)
        .where(where(trajectories, equals))
        .order_by(steps.c.trajectory_id, steps.c.idx)
    )
    return _frame(connection, query)


def trajectories(connection: Connection, equals: Mapping[str, Any], with_blobs: bool) -> Iterator[TrajectoryRow]:
    """Trajectories with steps and checks, in pages by id, so that memory stays flat however many there are."""
    table = TABLES["trajectories"]
    columns = [c for c in table.columns if with_blobs or c.name not in BLOBS]
    last = ""
    while True:
        query = select(*columns).where(where(table, equals), table.c.id > last).order_by(table.c.id).limit(_PAGE)
        page = connection.execute(query).mappings().all()
        if not page:
            return
        ids = [found["id"] for found in page]
        steps, checks = (_children(connection, name, ids) for name in ("steps", "checks"))
        for found in page:
            yield trajectory_from(dict(found), steps.get(found["id"], []), checks.get(found["id"], []))
        last = ids[-1]


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
    return _data_frame(result)


def _frame(connection: Connection, query: Select[Any]) -> pd.DataFrame:
    return _data_frame(connection.execute(query))


def _data_frame(result: CursorResult[Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(result.all(), columns=list(result.keys()))


def _children(connection: Connection, name: str, ids: list[str]) -> dict[str, list[Mapping[str, Any]]]:
    table = TABLES[name]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in connection.execute(select(table).where(table.c.trajectory_id.in_(ids))).mappings():
        found.setdefault(row["trajectory_id"], []).append(dict(row))
    return found
