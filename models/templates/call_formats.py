"""Tool calls as the text of a turn and back: the formats that a model may be trained to write."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from environments.contract import Action, Message, ToolCall, canonical_json

NAME = re.compile(r"[A-Za-z_][\w.\-]*")
TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def _parameters(tool: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Parameter name -> the JSON types that it takes (none: the schema names none), in the order of the schema."""
    properties = (tool["function"].get("parameters") or {}).get("properties") or {}
    return {name: _kinds(what) for name, what in properties.items()}


def _kinds(what: Any) -> frozenset[str]:
    if not isinstance(what, Mapping):
        return frozenset()
    named = what.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list | tuple):
        return frozenset(map(str, named))
    parts = [_kinds(part) for part in what.get("anyOf") or what.get("oneOf") or ()]
    return frozenset[str]().union(*parts) if all(parts) else frozenset()


def _typed(word: str, kinds: frozenset[str]) -> Any:
    """The word as one of the JSON types, or as it is if it is none; a JSON string is always what it quotes."""
    value = None if kinds == STRING and word[:1] != '"' else _json(word)
    if isinstance(value, str) or (not kinds and (value is not None or word == "null")):
        return value
    for kind in kinds & READ.keys():
        try:
            return READ[kind](word)
        except ValueError:
            continue
    return value if isinstance(value, list | dict) and kinds & {"array", "object"} else word


def _json(word: str) -> Any:
    """The JSON value that a word spells; None for one that spells none that can be stored."""
    try:
        value = json.loads(word)
        canonical_json(value).encode()  # NaN and lone surrogates are not JSON that can be stored
    except (ValueError, RecursionError):
        return None
    return value


def _number(word: str) -> int | float:
    try:
        return int(word)  # a float holds no integer of more than 53 bits
    except ValueError:
        value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is not a JSON number")
    return value  # 2.0 stays 2.0: an environment may say it again


def _one_of(word: str, values: Mapping[str, Any]) -> Any:
    if word not in values:
        raise ValueError(f"{word} is none of {', '.join(values)}")
    return values[word]


STRING = frozenset(("string",))
OPENS = ('"', "[", "{")
READ: Mapping[str, Callable[[str], Any]] = {
    "integer": int,
    "number": _number,
    "boolean": lambda word: _one_of(word.lower(), {"true": True, "false": False}),
    "null": lambda word: _one_of(word, {"null": None}),
}


def _cut(text: str) -> tuple[str, str, str]:
    """The first value, the comma behind it, and the rest. Commas within a JSON value belong to it."""
    if text[:1] in OPENS:
        try:
            end = json.JSONDecoder().raw_decode(text)[1]
        except (ValueError, RecursionError):
            end = 0
        after = text[end:].lstrip()
        if end and after[:1] in ("", ","):
            return text[:end], after[:1], after[1:].lstrip()
    word, comma, rest = text.partition(",")
    return word.strip(), comma, rest.lstrip()


def _later(text: str, names: Sequence[str]) -> str:
    """The name of `names` that stands in front of a value, as in `name=value`; "" for none."""
    name, equals, _ = text.partition("=")
    return name.strip() if equals and name.strip() in names else ""


def _word(value: Any, kinds: frozenset[str], names: Sequence[str]) -> str:
    """What is read back as `value` by the first of the parameters `names`, those that are left."""
    if not isinstance(value, str):
        return _json_text(value)
    if _typed(value, kinds) != value or value != value.strip() or len(value.splitlines()) > 1:
        return _json_text(value)
    # What opens like JSON might be closed by an argument behind it.
    whole = len(names) == 1 or (value[:1] not in OPENS and _cut(f"{value}, ")[0] == value)
    return value if whole and not _later(value, names[1:]) else _json_text(value)


def _json_text(value: Any) -> str:
    """A value as JSON; what is none as Python writes it, and so are numbers."""
    try:
        return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError):
        return str(value)


class CompactCalls:
    """`name(first, second)`: a handful of tokens a call, for small models. One call a turn.

    Arguments stand in the order of the tool's parameters; the last one takes all the rest, and `later=value` skips the
    parameters before `later`. Values take the type that the schema names where they can: text stands as it is where
    that is read back, else as a JSON string, and what is neither text nor a number is written as JSON. A turn that is
    not wholly a call is a message, and so is every turn where no tool is offered: a target may ask for an answer that
    looks like a call.
    """

    name = "compact"

    def system(self, instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
        """Instructions that already show every call stay as they are; else the signatures are added."""
        signatures = {t["function"]["name"]: ", ".join(_parameters(t)) for t in tools}
        if all(f"{name}(" in instructions for name in signatures):
            return instructions
        return f"{instructions}\nCalls: {' '.join(f'{name}({inner})' for name, inner in signatures.items())}"

    def turns(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with one call a turn: of several each gets a turn, and its own result behind it."""
        made, left = list[Message](), list(messages)
        while left:
            turn = left.pop(0)
            if len(turn.tool_calls) < 2:
                made.append(turn)
                continue
            count = next((i for i, message in enumerate(left) if message.role != "tool"), len(left))
            results, left = left[:count], left[count:]
            for call in turn.tool_calls:
                made.append(replace(turn, tool_calls=(call,)))
                named = (i for i, result in enumerate(results) if result.tool_call_id == call.id)
                made += [results.pop(next(named, 0))] if results else []
            made += results
        return made

    def write(self, content: str, calls: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of an assistant turn. A call of no tool in `tools` is written as if its arguments were all of the
        tool's parameters, of unknown types; an argument that is no parameter stands behind the others."""
        if not calls:
            return content
        given = calls[0].arguments
        schema = next((t for t in tools if t["function"]["name"] == calls[0].name), None)
        parameters = _parameters(schema) if schema else dict.fromkeys(given, frozenset[str]())
        names, words, place = list(parameters), list[str](), 0
        for name in [*(n for n in names if n in given), *(n for n in given if n not in parameters)]:
            skips = name in names[place + 1 :]
            place = names.index(name) if skips else place
            word = _word(given[name], parameters.get(name, STRING), names[place:])
            words.append(f"{name}={word}" if skips else word)
            place += 1
        return f"{calls[0].name}({', '.join(words) if words != [''] else _json_text('')})"

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
        """The action that a turn's text stands for. Too few values leave the last parameters out."""
        text = text.strip()
        name, opened, inner = text.partition("(")
        schema = next((t for t in tools if t["function"]["name"] == name), None)
        # A tool on offer may be called anything; of others a call is what looks like one.
        if not (tools and opened and inner.endswith(")") and (schema or NAME.fullmatch(name))):
            return Action(content=text) if text else Action(malformed="(nothing)")
        inner = inner[:-1]
        parameters = (_parameters(schema) if schema else {}) or {"argument_0": STRING}
        names, arguments = list(parameters), dict[str, Any]()
        rest, place, more = inner.strip(), 0, bool(inner.strip())
        while more:
            if later := _later(rest, names[place + 1 :]):
                place, rest = names.index(later), rest.partition("=")[2].lstrip()
            word, comma, rest = (rest, "", "") if place == len(names) - 1 else _cut(rest)
            arguments[names[place]] = _typed(word, parameters[names[place]])
            place, more = place + 1, bool(comma)
        return Action(tool_calls=(ToolCall(name, arguments, "call_0"),))


class JsonCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number a turn: what most open models learnt."""

    name = "json"

    def system(self, instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
        """Instructions, then one schema per line; without tools the instructions alone."""
        if not tools:
            return instructions
        lines = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
        how = 'To call a tool, answer <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
        return f"{instructions}\n\nTools:\n{lines}\n\n{how}"

    def turns(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as they are: a turn has any number of calls."""
        return list(messages)

    def write(self, content: str, calls: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        tags = [
            f"<tool_call>{json.dumps({'name': c.name, 'arguments': dict(c.arguments)}, ensure_ascii=False)}</tool_call>"
            for c in calls
        ]
        return "\n".join(([content] if content else []) + tags)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
        found = TAGGED.findall(text)
        if not found:
            malformed = "<tool_call>" in text
            return Action(malformed=text.strip()) if malformed else Action(content=text.strip())
        calls = []
        for index, body in enumerate(found):
            try:
                call = json.loads(body)
                canonical_json(call).encode()  # NaN and lone surrogates are not JSON that can be stored
                calls.append(ToolCall(str(call["name"]), dict(call.get("arguments") or {}), f"call_{index}"))
            except (ValueError, KeyError, TypeError, RecursionError):
                return Action(malformed=text.strip())
        return Action(content=TAGGED.sub("", text).strip(), tool_calls=tuple(calls))


FORMATS: Mapping[str, type[CompactCalls] | type[JsonCalls]] = {"compact": CompactCalls, "json": JsonCalls}
