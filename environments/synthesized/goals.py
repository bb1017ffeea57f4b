"""The hidden part of a generated scenario: what must have happened, written as data and judged outside the sandbox.

A module says with each scenario what its goal is; the goal never enters the module's transition, and whether it was
reached is computed here, from the calls that *this* side of the pipe recorded. So nothing that runs in the sandbox,
and nothing an agent makes it do, can declare success.

A goal is a JSON object with at least one of the first three keys:

- `calls`: [{"name", "arguments"}], tool calls that must be made, in this order, with exactly these arguments;
- `state`: {"orders.7.status": "cancelled"}, dotted paths and the values they must have in the end;
- `says`: ["12.50"], words that the last message must hold (whole words and numbers, any case), in at most `MAX_WORDS`
  words;
- `silent`: words that no message may hold;
- `allowed`: names of tools that may be called besides (reads). Any other call that took effect fails the goal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import Check, canonical_json

MAX_WORDS = 80
MAX_DEPTH, MAX_NODES, MAX_CHARACTERS = 32, 20_000, 200_000
_KEYS = {"calls", "state", "says", "silent", "allowed"}


def plain_json(value: Any, what: str = "the value") -> Any:
    """`value` itself when it is bounded plain JSON, so that it can be compared, hashed and stored.

    Raises `ValueError` saying what is wrong: depth over 32, more than 20,000 parts or 200,000 characters, numbers that
    are not finite or beyond 64 bits, lone surrogates, or a type that JSON does not have.
    """
    nodes = characters = 0
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        part, depth = pending.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}")
        if isinstance(part, str):
            characters += len(part)
            if not part.isascii() and any("\ud800" <= letter <= "\udfff" for letter in part):
                raise ValueError(f"{what} holds a lone surrogate")
        elif isinstance(part, float):
            if not math.isfinite(part):
                raise ValueError(f"{what} holds a number that is not finite")
        elif isinstance(part, bool) or part is None:
            pass
        elif isinstance(part, int):
            if not -(2**63) <= part < 2**63:
                raise ValueError(f"{what} holds an integer beyond 64 bits")
        elif isinstance(part, Mapping):
            if not all(isinstance(key, str) for key in part):
                raise ValueError(f"{what} has a key that is no string")
            pending += [(item, depth + 1) for pair in part.items() for item in pair]
        elif isinstance(part, list | tuple):
            pending += [(item, depth + 1) for item in part]
        else:
            raise ValueError(f"{what} holds a {type(part).__name__}, which is no JSON")
        if nodes > MAX_NODES or characters > MAX_CHARACTERS:
            raise ValueError(f"{what} is larger than {MAX_NODES} parts or {MAX_CHARACTERS} characters")
    return value


def goal_faults(goal: Any, tools: Sequence[str]) -> list[str]:
    """What is wrong with a goal, in sentences; empty when it can be judged."""
    if not isinstance(goal, dict):
        return [f"goal is {type(goal).__name__}, not an object"]
    faults = [f"goal has the unknown key {key!r}" for key in sorted(set(goal) - _KEYS)]
    if not any(goal.get(key) for key in ("calls", "state", "says")):
        faults.append("goal asks for nothing: it needs calls, state or says")
    for key in ("says", "silent", "allowed"):
        if not (isinstance(goal.get(key, []), list) and all(isinstance(v, str) and v for v in goal.get(key, []))):
            faults.append(f"goal.{key} is no list of strings")
    if not isinstance(goal.get("state", {}), dict):
        faults.append("goal.state is no object")
    calls = goal.get("calls", [])
    if not (isinstance(calls, list) and all(map(_is_call, calls))):
        return [*faults, 'goal.calls is no list of {"name": text, "arguments": object}']
    if not faults:
        unknown = {c["name"] for c in calls} | set(goal.get("allowed", []))
        faults += [f"goal names the tool {name!r}, which TOOLS has not" for name in sorted(unknown - set(tools))]
    return faults


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return False
    return isinstance(call["name"], str) and isinstance(call["arguments"], dict)


def judge_goal(goal: Mapping[str, Any], state: Any, log: Sequence[Mapping[str, Any]], kind: str) -> tuple[Check, ...]:
    """One check per thing that the goal asks for. `log` holds {"name", "arguments", "result"} and {"say"} entries;
    calls that were refused before they reached the module carry "error" and had no effect."""
    made = [entry for entry in log if "name" in entry and "error" not in entry]
    said = [str(entry["say"]) for entry in log if "say" in entry]
    matched: set[int] = set()
    checks, position = [], 0
    for number, wanted in enumerate(goal.get("calls", [])):
        found = next((i for i in range(position, len(made)) if _same_call(made[i], wanted)), None)
        if found is not None:
            matched.add(found)
            position = found + 1
        detail = "" if found is not None else f"not called with {canonical_json(wanted['arguments'])}"
        checks.append(Check(f"call_{number}_{wanted['name']}", kind, True, found is not None, detail))
    allowed = set(goal.get("allowed", []))
    extra = [entry["name"] for i, entry in enumerate(made) if i not in matched and entry["name"] not in allowed]
    checks.append(Check("no_other_calls", kind, bool(extra), not extra, ", ".join(map(str, extra[:5]))))
    for path, value in goal.get("state", {}).items():
        present, actual = _lookup(state, path)
        right = present and _same(actual, value)
        checks.append(Check(f"state_{path}", kind, True, right, "" if right else f"is {actual!r}"[:200]))
    last = said[-1] if said else ""
    brief = len(last.split()) <= MAX_WORDS
    for phrase in goal.get("says", []):
        checks.append(Check(f"says_{phrase}", kind, True, brief and _holds(last, phrase), "" if brief else "too long"))
    for phrase in goal.get("silent", []):
        broken = any(_holds(text, phrase) for text in said)
        checks.append(Check(f"silent_{phrase}", kind, broken, not broken))
    return tuple(checks)


def _same_call(made: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return made["name"] == wanted["name"] and _same(made["arguments"], wanted["arguments"])


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 12 and 12.0 are one number, true and 1 are not (in Python they are)."""
    return canonical_json(_whole(one)) == canonical_json(_whole(other))


def _whole(value: Any) -> Any:
    """The value with whole numbers as integers: which of the two forms a number has, nobody is told."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _whole(part) for key, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list | tuple) else value


def _lookup(state: Any, path: str) -> tuple[bool, Any]:
    value = state
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def _holds(text: str, phrase: str) -> bool:
    """Whether a text holds a phrase as whole words, any case; a number is no part of another one: "12" is said by
    "12.00", and not by "12.50"."""
    before = r"(?<!\d\.)" if phrase[0].isdecimal() else ""
    after = r"(?!\.0*[1-9])" if phrase[-1].isdecimal() else ""
    return re.search(rf"(?<!\w){before}{re.escape(phrase)}(?!\w){after}", text, re.IGNORECASE) is not None
