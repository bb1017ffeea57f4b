"""The answer to a question: one line, `name(a=5, b="x"); other(...)`, or `none`. Read without running any of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

# Calls as BFCL's checker takes them: one {function name: {argument: value}} a call; none at all for `none`.
Calls: TypeAlias = Sequence[Mapping[str, Mapping[str, Any]]]
NONE = "none"
# The longest reference has 700 characters. Python's parser is not made for hostile text without end.
MOST_CHARACTERS = 4000


class UnreadableAnswer(ValueError):
    """Why a text is no answer."""


def read_answer(text: str) -> list[dict[str, dict[str, Any]]]:
    """The calls of an answer in their order, [] for `none`.

    Values are literals; a bare word counts as its text, as in BFCL's own reading. Raises `UnreadableAnswer` on anything
    else: talk beside the calls, values without a name, arithmetic, a call within a call.
    """
    text = text.strip()
    if text.rstrip(".").lower() == NONE:
        return []
    if len(text) > MOST_CHARACTERS:
        raise UnreadableAnswer(f"longer than {MOST_CHARACTERS} characters")
    try:
        statements = ast.parse(text).body
        if not statements:
            raise UnreadableAnswer("empty")
        return [_call(statement) for statement in statements]
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        if isinstance(error, UnreadableAnswer):
            raise
        raise UnreadableAnswer(f"not calls: {getattr(error, 'msg', error)}") from error


def _call(statement: ast.stmt) -> dict[str, dict[str, Any]]:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        raise UnreadableAnswer("not a call")
    if call.args:
        raise UnreadableAnswer("a value without its name")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UnreadableAnswer("a value without its name")
        arguments[keyword.arg] = _value(keyword.value)
    return {_name(call.func): arguments}


def _name(node: ast.expr) -> str:
    """A function's name, which may have dots."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise UnreadableAnswer("a function without a name")


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=word):
            return word
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise UnreadableAnswer(f"a value that is no literal ({type(node).__name__})")


def write_answer(calls: Calls) -> str:
    """The line that `read_answer` reads back as `calls`."""
    return "; ".join(f"{name}({_arguments(given)})" for call in calls for name, given in call.items()) or NONE


def _arguments(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_literal(value)}" for key, value in given.items())


def _literal(value: Any) -> str:
    """A value as Python reads it, texts between double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def reference_answer(functions: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> Calls:
    """The calls that BFCL's possible answers ask for: of each argument the first value that they accept, without
    what may be left out."""
    described = {function["name"]: function["parameters"] for function in functions}
    calls = []
    for accepted_call in reference:
        ((name, accepted_values),) = accepted_call.items()
        required = described[name].get("required", ())
        given = {
            key: _accepted(accepted)
            for key, accepted in accepted_values.items()
            if accepted and (key in required or "" not in accepted)
        }
        calls.append({name: given})
    return calls


def _accepted(accepted: Sequence[Any]) -> Any:
    """The first value accepted. "" says that an argument may be left out; it is a value only where it stands alone."""
    return _plain(next((value for value in accepted if value != ""), ""))


def _plain(value: Any) -> Any:
    """An accepted value as an agent gives it: within an object, each key has a list of accepted values too."""
    if isinstance(value, dict):
        return {key: next(v for v in accepted if v != "") for key, accepted in value.items() if "" not in accepted}
    if isinstance(value, list):
        return [_plain(item) if isinstance(item, dict) else item for item in value]
    return value
