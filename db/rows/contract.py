"""What every row of a small table is: a dataclass whose fields are the columns of one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from db.values.states import STATES_OF, parse_state
from db.values.text import clean_value


class Row(Protocol):
    """A frozen dataclass with one field for each column of the table `TABLE`. A field is optional where the column may
    be null, and has a default where the column has one or may be null."""

    TABLE: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


AnyRow = TypeVar("AnyRow", bound=Row)


def values_of(row: Row) -> dict[str, Any]:
    """The columns of a row, as both databases keep them. Raises `StoreError` for NaN and infinity."""
    return {f.name: _plain(clean_value(getattr(row, f.name), "column", f.name, "of", row.TABLE)) for f in fields(row)}


def row_from(kind: type[AnyRow], values: Mapping[str, Any]) -> AnyRow:
    """The row that was stored, its state as a member of the enum that belongs to the table."""
    given = dict(values)
    if kind.TABLE in STATES_OF:
        given["state"] = parse_state(kind.TABLE, given["state"])
    make: Any = kind
    row: AnyRow = make(**given)
    return row


def _plain(value: Any) -> Any:
    """Open payloads as the JSON encoder takes them."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value
