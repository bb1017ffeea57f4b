"""What the agent reads: instructions, five worked examples, and the question below the signatures of the functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from environments.contract import Message
from environments.targets.bfcl.single.answers import NONE

INSTRUCTIONS = (
    "Answer the question with calls of the functions above it, all in one line: "
    'name(a=5, b="x"); other(c=[1, 2]). Brackets mark what may be left out. '
    f"If no function fits, answer {NONE}."
)


def signature(function: Mapping[str, Any]) -> str:
    """`name(a=integer, [b=string]) - description`, with BFCL's own names of types."""
    parameters = function["parameters"]
    required = parameters.get("required", ())
    shown = [
        f"{key}={_kind(what)}" if key in required else f"[{key}={_kind(what)}]"
        for key, what in parameters.get("properties", {}).items()
    ]
    return f"{function['name']}({', '.join(shown)}) - {function['description']}"


def _kind(parameter: Mapping[str, Any]) -> str:
    inner = parameter.get("items")
    kind = str(parameter.get("type", "any"))
    return f"{kind} of {inner['type']}" if isinstance(inner, Mapping) and "type" in inner else kind


def asked(functions: Sequence[Mapping[str, Any]], messages: Iterable[Sequence[str]]) -> tuple[Message, ...]:
    """The conversation: the signatures stand before its first message. `messages` are pairs of role and text."""
    (role, text), *rest = messages
    first = "\n".join([*map(signature, functions), f"Question: {text}"])
    return (_message(role, first), *(_message(role, text) for role, text in rest))


def _message(role: str, text: str) -> Message:
    return Message("assistant" if role == "assistant" else "user", text)


def _function(name: str, description: str, required: Mapping[str, str], **optional: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in {**required, **optional}.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "dict", "properties": properties, "required": list(required)},
    }


_WATER = _function(
    "water_plants", "Water a bed of the garden.", {"bed": "string", "minutes": "integer"}, start="string"
)
_PAINT = _function("wall.paint_needed", "Litres of paint for a wall.", {"height": "float", "width": "float"})
_TILES = _function(
    "wall.tiles_needed", "Number of tiles for a wall.", {"height": "float", "width": "float", "tile": "float"}
)
_LATE = _function("report_late_bus", "Report that a bus is late.", {"line": "integer", "minutes": "integer"})
_SHELF = _function("find_shelf", "Shelf of a book in the library.", {"title": "string"})
_RENEW = _function("renew_loan", "Keep a borrowed book for longer.", {"title": "string", "days": "integer"})
_ROOM = _function("reserve_study_room", "Reserve a study room.", {"people": "integer"}, quiet="boolean")

# Made up, one a family. Their functions and questions are no item's.
WORKED: Sequence[tuple[Sequence[Mapping[str, Any]], str, str]] = (
    ([_WATER], "Please water the rose bed for 15 minutes.", 'water_plants(bed="rose", minutes=15)'),
    (
        [_TILES, _PAINT],
        "My wall is 2.5 m high and 4.2 m wide. How much paint do I need?",
        "wall.paint_needed(height=2.5, width=4.2)",
    ),
    (
        [_LATE],
        "Report bus line 7 as 12 minutes late and line 31 as 20 minutes late.",
        "report_late_bus(line=7, minutes=12); report_late_bus(line=31, minutes=20)",
    ),
    (
        [_RENEW, _SHELF, _ROOM],
        'Where does "Emma" stand? And let me keep "Dracula" for 10 more days.',
        'find_shelf(title="Emma"); renew_loan(title="Dracula", days=10)',
    ),
    ([_WATER], "Which bus goes to the harbour?", NONE),
)
EXAMPLES: tuple[Message, ...] = tuple(
    message
    for functions, question, answer in WORKED
    for message in (*asked(functions, [("user", question)]), Message("assistant", answer))
)
