"""The small tables by the names of tables and columns, for callers that do not use the row dataclasses yet.

When none is left: delete this file, and take `Store` and `open_store` from `db.store` in `db/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from sqlalchemy import Connection, Table

import db.store
from db import queries
from db.rows import SMALL_TABLES, Row, values_of
from db.rows.contract import AnyRow
from db.schema import TABLES
from db.states import STATES_OF, AdapterState, EnvironmentState, RoundState, parse_state
from db.text import clean_value
from db.writes import check_states, insert_rows
from errors import StoreError

_KIND_OF: dict[str, type[Row]] = {kind.TABLE: kind for kind in SMALL_TABLES}
_OWN_DOOR = dict.fromkeys(("trajectories", "steps", "checks"), "add_trajectories()") | {"stages": "stage()"}


class Store(db.store.Store):
    """The store, which also takes a table's name where a row dataclass stands, and dicts where rows stand."""

    @overload
    def put(self, rows: Sequence[Row], /, *, replace: bool = False) -> None: ...
    @overload
    def put(self, name: str, rows: Sequence[Mapping[str, Any] | Row], /, *, replace: bool = False) -> None: ...
    def put(self, given: Any, rows: Any = (), /, *, replace: bool = False) -> None:
        if not isinstance(given, str):
            super().put(given, replace=replace)
            return
        with self._write() as connection:
            _put_rows(connection, given, [r if isinstance(r, Mapping) else values_of(r) for r in rows], replace)

    @overload
    def rows(self, kind: type[AnyRow], /, **equals: Any) -> list[AnyRow]: ...
    @overload
    def rows(self, name: str, /, **equals: Any) -> list[dict[str, Any]]: ...
    def rows(self, given: Any, /, **equals: Any) -> Any:
        if not isinstance(given, str):
            return super().rows(given, **equals)
        with self._read() as connection:
            return queries.stored_values(connection, _table_named(given), equals)

    @overload
    def row(self, kind: type[AnyRow], /, **equals: Any) -> AnyRow | None: ...
    @overload
    def row(self, name: str, /, **equals: Any) -> dict[str, Any] | None: ...
    def row(self, given: Any, /, **equals: Any) -> Any:
        if not isinstance(given, str):
            return super().row(given, **equals)
        found = self.rows(given, **equals)
        if len(found) > 1:
            raise StoreError(f"{len(found)} rows of {given!r} have {equals}; give the whole key")
        return found[0] if found else None

    @overload
    def set_state(
        self, kind: type[Row], row_id: str, state: RoundState | EnvironmentState | AdapterState, /, **values: Any
    ) -> None: ...
    @overload
    def set_state(self, name: str, row_id: str, state: str, /, **values: Any) -> None: ...
    def set_state(self, given: Any, row_id: str, state: Any, /, **values: Any) -> None:
        if not isinstance(given, str):
            super().set_state(given, row_id, state, **values)
            return
        wanted: Any = parse_state(given, state)
        super().set_state(_KIND_OF[given], row_id, wanted, **values)


def open_store(url: str) -> Store:
    """`db.store.open_store`, with this file's `Store`."""
    return Store(db.store.open_store(url)._engines)


def _put_rows(connection: Connection, name: str, rows: Sequence[Mapping[str, Any]], replace: bool) -> None:
    table = _table_named(name)
    if name in _OWN_DOOR:
        raise StoreError(f"rows of {name!r} are written by {_OWN_DOOR[name]}, which keeps their rules")
    groups: dict[frozenset[str], list[dict[str, Any]]] = {}
    for row in rows:
        unknown = set(row) - set(table.columns.keys())
        if unknown:
            raise StoreError(
                f"table {name!r} has no column {sorted(unknown)}; it has {', '.join(table.columns.keys())}"
            )
        missing = [column.name for column in table.primary_key if row.get(column.name) is None]
        if missing:
            raise StoreError(f"a row for table {name!r} lacks {missing}; every row needs its whole key")
        cleaned = {key: clean_value(value, "column", key, "of", name) for key, value in row.items()}
        groups.setdefault(frozenset(row), []).append(cleaned)
    if name in STATES_OF:
        check_states(connection, table, rows, replace)
    for group in groups.values():
        insert_rows(connection, table, group, replace)


def _table_named(name: str) -> Table:
    table = TABLES.get(name)
    if table is None:
        raise StoreError(f"there is no table {name!r}; there are {', '.join(sorted(TABLES))}")
    return table
