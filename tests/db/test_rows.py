"""The row dataclasses and the tables cannot drift apart: every table has one class, with exactly its columns."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import datetime
from types import NoneType, UnionType
from typing import Any

import pytest
from sqlalchemy import JSON

from db.rows import SMALL_TABLES, Row, StageRow, TrajectoryRow, values_of
from db.schema import TABLES
from db.values.states import STATES_OF
from db.values.types import Utc, utc_now
from errors import StoreError

# Trajectories are stored whole, with their steps and checks.
TOGETHER = {"trajectories", "steps", "checks"}
kinds = pytest.mark.parametrize("kind", SMALL_TABLES, ids=lambda kind: kind.__name__)


def types_of(kind: type[Row]) -> dict[str, list[Any]]:
    """The types of each field, `NoneType` among them where it is optional, without the types inside brackets."""
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name != "TABLE"}
    parts = {n: typing.get_args(hint) if isinstance(hint, UnionType) else (hint,) for n, hint in hints.items()}
    return {name: [typing.get_origin(part) or part for part in given] for name, given in parts.items()}


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def test_every_table_has_one_class() -> None:
    assert sorted(kind.TABLE for kind in SMALL_TABLES) == sorted(set(TABLES) - TOGETHER)


@kinds
def test_the_fields_are_the_columns(kind: type[Row]) -> None:
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert [field.name for field in fields(kind)] == TABLES[kind.TABLE].columns.keys()


@kinds
def test_a_field_is_optional_where_the_column_may_be_null(kind: type[Row]) -> None:
    optional = {name for name, types in types_of(kind).items() if NoneType in types}
    assert optional == {column.name for column in TABLES[kind.TABLE].columns if column.nullable}


@kinds
def test_a_field_has_the_default_of_its_column(kind: type[Row]) -> None:
    for field in fields(kind):
        column = TABLES[kind.TABLE].c[field.name]
        if column.default is None:
            assert default_of(field) is (None if column.nullable else MISSING), field.name
        elif isinstance(column.type, Utc):
            assert field.default_factory is utc_now, field.name
        else:
            wanted = column.default.arg(None) if column.default.is_callable else column.default.arg
            assert default_of(field) == wanted, field.name


@kinds
def test_a_field_has_the_type_of_its_column(kind: type[Row]) -> None:
    for name, types in types_of(kind).items():
        column, given = TABLES[kind.TABLE].c[name], set(types) - {NoneType}
        if name == "state":
            assert given == {STATES_OF[kind.TABLE]}
        elif isinstance(column.type, JSON):
            assert given <= {Mapping, Sequence}, name
        else:
            assert given == {datetime if isinstance(column.type, Utc) else column.type.python_type}, name


def test_the_fields_of_a_trajectory_are_its_columns() -> None:
    names = {field.name for field in fields(TrajectoryRow)} - {"steps", "checks"}
    assert names == set(TABLES["trajectories"].columns.keys()) - {"n_steps"}


def test_payloads_of_any_kind_become_plain_json() -> None:
    class Lazy(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            return {"episodes": 3}[key]

        def __iter__(self) -> Any:
            return iter(["episodes"])

        def __len__(self) -> int:
            return 1

    values = values_of(StageRow(id="s", round_id="r", name="rollout", result=Lazy()))
    assert values["result"] == {"episodes": 3}
    assert type(values["result"]) is dict
    with pytest.raises(StoreError, match="column seconds of stages is nan"):
        values_of(StageRow(id="s", round_id="r", name="rollout", seconds=float("nan")))
