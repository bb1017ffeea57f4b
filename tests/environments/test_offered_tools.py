"""Tools that a model could not be shown, or whose calls would be read as another tool's, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from environments.offered import refuse_tools
from errors import EnvironmentFault

DAY = {"type": "object", "properties": {"day": {"type": "string", "enum": ["Monday"]}}, "required": ["day"]}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def of_day(**changes: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"day": {"type": "string", **changes}}}


REFUSED: dict[str, tuple[Any, str]] = {
    "no schema": (None, r"the parameters of the tool 'agenda' are None; give a schema, such as \{'type': 'object'\}"),
    "no properties": ({"properties": None}, "have properties None; give a dict of schemas, or leave it out"),
    "a property that is a text": ({"properties": {"day": "string"}}, "property 'day', are 'string'; give a schema"),
    "a requirement that is no list": (DAY | {"required": True}, "have required True; give a list of names"),
    "a list of nothing": (of_day(items=None), "property 'day', have items None; give a schema, or leave it out"),
    "a list of lists of no schema": (of_day(items={"items": {"enum": 3}}), "items, items, have enum 3; give a list"),
    "values that are no list": (of_day(enum="Monday"), "property 'day', have enum 'Monday'; give a list of values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parameters_that_are_no_schema_are_refused(name: str) -> None:
    parameters, said = REFUSED[name]
    with pytest.raises(EnvironmentFault, match=said):
        refuse_tools([tool("agenda", parameters=parameters)])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(EnvironmentFault, match="tools hold two of the name 'agenda'; give each its own"):
        refuse_tools([tool("agenda", parameters=DAY), tool("book"), tool("agenda", parameters={})])


def test_tools_that_a_model_can_be_shown_pass() -> None:
    refuse_tools([tool("agenda", parameters=DAY), tool("book", parameters={}), tool("leave")])
