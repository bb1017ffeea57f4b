"""The compact form of a call brings every argument back, and writes the shop's calls as it always did."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.contract import SPLITS, ToolCall
from environments.targets.catalogue import load_target
from models.templates.call_formats import CompactCalls

COMPACT = CompactCalls()
HOSTILE = ("", " ", ", ", "a, b", '"', '"a"', "[1", "[1, 2]", "{", "}", ")", "null", "true", "True", "7", "7.0", "nan")
HOSTILE += ("two=x", "three = [1]", "line\nline", " x", "x ", "\u00a0", "\\", "don't (now), é")
TEXTS = st.sampled_from(HOSTILE) | st.lists(st.sampled_from(HOSTILE), max_size=3).map("".join) | st.text(max_size=8)
INTEGERS, NUMBERS = st.integers(), st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(TEXTS, part, max_size=3),
    max_leaves=4,
)
LISTS, OBJECTS = st.lists(ANY, max_size=3), st.dictionaries(TEXTS, ANY, max_size=3)
KINDS: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({"type": "string"}, TEXTS),
    ({"type": "integer"}, INTEGERS),
    ({"type": "number"}, NUMBERS),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"type": "array"}, LISTS),
    ({"type": "object"}, OBJECTS),
    ({"type": ["string", "null"]}, TEXTS | st.none()),
    ({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "boolean"}]}, NUMBERS | TEXTS | st.booleans()),
    ({"anyOf": [{"type": "array"}, {"type": "string"}]}, LISTS | TEXTS),
    ({}, ANY),
    ({"$ref": "#/$defs/any"}, ANY),
]


def test_a_quote_is_not_closed_by_the_argument_behind_it() -> None:
    properties = {"one": {"type": "string"}, "two": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "do", "parameters": {"properties": properties}}}]
    for value in ('"', "[", "{"):
        call = ToolCall("do", {"one": value, "two": f", {value}"})
        (read,) = COMPACT.read(COMPACT.write("", (call,), tools), tools).tool_calls
        assert read.arguments == call.arguments


@pytest.mark.parametrize("name", ["2fa_check", "shop:find", "shop/find", "find order", "find_é", "-f", "a.b"])
def test_a_call_of_a_tool_on_offer_is_read_whatever_it_is_called(name: str) -> None:
    """Protocols of tools ask for less of a name than programming languages do."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {"properties": {"one": {}}}}}]
    call = ToolCall(name, {"one": "x (y)"})
    text = COMPACT.write("", (call,), tools)
    (read,) = COMPACT.read(f" {text}\n", tools).tool_calls
    assert (read.name, read.arguments) == (call.name, call.arguments)
    assert COMPACT.read("3(a)", tools).content == "3(a)"
    assert COMPACT.read("other(a)", tools).tool_calls[0].name == "other"


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_call_is_read_back_with_every_type_of_argument(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(KINDS), max_size=4))
    named = dict(zip(("one", "two", "three", "four"), chosen, strict=False))
    properties = {name: schema for name, (schema, _) in named.items()}
    tools = [{"type": "function", "function": {"name": "do", "parameters": {"properties": properties}}}]
    left_out = data.draw(st.sets(st.sampled_from(list(named)))) if named else set()
    arguments = {name: data.draw(values) for name, (_, values) in named.items() if name not in left_out}
    backwards = dict(reversed(arguments.items()))  # some references do not name them in the order of the schema
    text = COMPACT.write("", (ToolCall("do", data.draw(st.sampled_from((arguments, backwards)))),), tools)
    (call,) = COMPACT.read(text, tools).tool_calls
    assert json.dumps(call.arguments) == json.dumps(arguments), text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("do(True, a, [])", {"flag": True, "text": "a", "list": []}),
        ('do(yes, say "a, [1, 2])', {"flag": "yes", "text": 'say "a', "list": [1, 2]}),
        ("do(1, (a, [1)", {"flag": "1", "text": "(a", "list": "[1"}),
        ("do(false, text=x, ['a'])", {"flag": False, "text": "text=x", "list": "['a']"}),
        ("do(false, list=[NaN])", {"flag": False, "list": "[NaN]"}),
    ],
)
def test_words_that_are_no_json_of_the_type_reach_the_environment(text: str, arguments: dict[str, Any]) -> None:
    kinds = {"flag": "boolean", "text": "string", "list": "array"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    tools = [{"function": {"name": "do", "parameters": {"properties": properties}}}]
    (call,) = COMPACT.read(text, tools).tool_calls
    assert call.arguments == arguments


@pytest.mark.parametrize("name", ["shop", "shop:shift"])
def test_the_calls_of_the_shop_are_written_as_words_with_commas_between(name: str) -> None:
    target = load_target(name)
    environment = target.environment()
    calls = [call for message in environment.examples for call in message.tool_calls]
    for task in [task for split in SPLITS for task in target.tasks(split)[:60]]:
        done = environment.reset(task).done
        while not done and (action := environment.oracle()) is not None:
            calls += action.tool_calls
            done = environment.step(action).done
    assert {call.name for call in calls} == {tool["function"]["name"] for tool in environment.tools}
    for call in calls:
        as_before = f"{call.name}({', '.join(map(str, call.arguments.values()))})"
        assert COMPACT.write("", (call,), environment.tools) == COMPACT.write("", (call,)) == as_before
