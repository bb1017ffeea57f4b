"""Lazy policies: ways to act that need no capability, whatever the author of an environment thinks of.

Each knows the *form* of a right episode (which tools are called in which order: a plan) and copies, guesses or repeats
what stands in the conversation. An environment in which one of them is paid does not need its capability. They see what
an agent sees (tools, examples, messages) and never the environment's oracle; the plans are read from it beforehand.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.contract import Action, Environment, Message, ToolCall
from environments.validation.playing import SimplePolicy

Plan = tuple[str, ...]
# What an episode of a lazy policy is: it yields actions and is sent the conversation so far.
Episode = Generator[Action, "Seat", None]

# Values by order and by name, from which a call is filled.
Fill = Callable[["Seat"], tuple[Sequence[str], Mapping[str, Any]]]

REFUSAL = "I am sorry, but I cannot help you with that."
_TRIES = 20
_VALUE = re.compile(r"\"([^\"]+)\"|([#\w][\w.@:/-]*\w|\d)")
_REFUSED = re.compile(r"\b(error|fail\w*|invalid|not found|no such|unknown|denied|wrong|incorrect)\b", re.I)


@dataclass(frozen=True)
class Seat:
    """What a lazy policy has before it: tools by name, the plan, the conversation, values known beforehand (of examples
    or evidence), and random numbers."""

    tools: Mapping[str, Mapping[str, Any]]
    plan: Plan
    messages: Sequence[Message]
    known: Sequence[str]
    rng: random.Random


@dataclass(frozen=True)
class LazyPolicy:
    """One way to be lazy. `act` plays an episode; `sources` says where its values come from; `planned` policies are
    bound to each plan in turn, the others play the same whatever the plan."""

    name: str
    tries: str
    act: Callable[[Seat], Episode]
    sources: str = "conversation"
    planned: bool = True


def values_told(messages: Sequence[Message]) -> tuple[list[str], dict[str, Any]]:
    """(values in the order in which user and tools told them, the last value of each key of a tool's JSON result).

    A value is a leaf of JSON, a text in double quotes, or a word with a digit in it. Arguments of calls that were not
    refused are named, too, where no result has a key of that name."""
    values: list[str] = []
    named: dict[str, Any] = {}
    for message in messages:
        if message.role not in ("user", "tool"):
            continue
        try:
            told = json.loads(message.content)
        except ValueError:
            told = None
        if isinstance(told, dict | list):
            _leaves(told, "", values, named)
        else:
            values += words_with_digits(message.content)
    return values, accepted_arguments(messages) | named


def accepted_arguments(messages: Sequence[Message]) -> dict[str, Any]:
    """Arguments of the calls that were answered without an error, the last of each name."""
    named: dict[str, Any] = {}
    called: dict[str, Mapping[str, Any]] = {}
    for message in messages:
        called |= {call.id: call.arguments for call in message.tool_calls}
        if message.role == "tool" and not _REFUSED.search(message.content):
            named |= called.get(message.tool_call_id, {})
    return named


def words_with_digits(text: str) -> list[str]:
    """Texts in double quotes, and words that hold a digit, in order."""
    found = [quoted or word for quoted, word in _VALUE.findall(text)]
    return [word for word in found if " " in word or re.search(r"\d", word)]


def policy_of(lazy: LazyPolicy, plan: Plan, known: Sequence[str] = ()) -> SimplePolicy:
    """The lazy policy bound to a plan, as validation plays policies."""
    episode: Episode | None = None

    def policy(environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        nonlocal episode
        tools = {str(tool["function"]["name"]): tool["function"] for tool in environment.tools}
        seat = Seat(tools, plan, messages, known, rng)
        try:
            if episode is None or not any(message.role == "assistant" for message in messages):
                episode = lazy.act(seat)
                return next(episode)
            return episode.send(seat)
        except StopIteration:
            return None

    return policy


def unbound_reason(lazy: LazyPolicy, plan: Plan, tools: Sequence[Mapping[str, Any]], known: Sequence[str]) -> str:
    """Why the policy cannot be bound to this plan and these tools; "" when it can."""
    names = {str(tool["function"]["name"]) for tool in tools}
    missing = sorted(set(plan) - names)
    if missing:
        return f"the environment has no tool {missing[0]!r}"
    if lazy.sources != "conversation" and not known:
        return f"there are no values in the {lazy.sources} to copy"
    return ""


def _leaves(value: Any, key: str, values: list[str], named: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for name, part in value.items():
            _leaves(part, name, values, named)
    elif isinstance(value, list):
        for part in value:
            _leaves(part, key, values, named)
    elif value is not None:
        values.append(str(value))
        named[key] = value


def _call(seat: Seat, name: str, values: Sequence[str], named: Mapping[str, Any]) -> Action:
    """A call with every required argument filled: from a result's key of that name, else the next value of its type."""
    schema = seat.tools[name].get("parameters", {})
    pool = list(values)
    arguments = {}
    for parameter in schema.get("required", ()):
        part = schema.get("properties", {}).get(parameter, {})
        arguments[parameter] = _value(part, named.get(parameter), pool, seat.rng)
    return Action(tool_calls=(ToolCall(name, arguments, f"call_{len(seat.messages)}"),))


def _value(schema: Mapping[str, Any], named: Any, pool: list[str], rng: random.Random) -> Any:
    """`pool` loses what is taken from it, so that two arguments get two values."""
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    kind = schema.get("type")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [_value(schema.get("items", {}), named, pool, rng)]
    if kind == "object":
        return {key: _value(part, None, pool, rng) for key, part in schema.get("properties", {}).items()}
    if kind in ("integer", "number"):
        if isinstance(named, int | float) and not isinstance(named, bool):
            return named
        for text in pool:
            if re.fullmatch(r"#?-?\d{1,15}", text) or (kind == "number" and re.fullmatch(r"-?\d{1,12}\.\d+", text)):
                pool.remove(text)
                return float(text) if "." in text else int(text.removeprefix("#"))
        return _number(schema, rng)
    if isinstance(named, str):
        return named
    return pool.pop(0) if pool else str(rng.randint(1, 99))


def _number(schema: Mapping[str, Any], rng: random.Random) -> float:
    """A number within the limits of a schema. Where one is not given, or is no number, it is 1 or 99, or 98 away from
    the other where that is beyond it."""
    low, high = _limit(schema.get("minimum")), _limit(schema.get("maximum"))
    if low is None:
        low = 1 if high is None or high >= 1 else high - 98
    if high is None:
        high = 99 if low <= 99 else low + 98
    drawn = rng.randint(int(low), max(int(low), int(high)))
    inside = max(low, min(drawn, high))  # another number only where a limit is no integer, or the two contradict
    return math.ceil(inside) if schema.get("type") == "integer" else inside


def _limit(value: Any) -> float | None:
    """A schema's limit; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _newest(seat: Seat) -> tuple[list[str], dict[str, Any]]:
    """Values, the newest first, and those that have a name."""
    values, named = values_told(seat.messages)
    return values[::-1], named


def _told(seat: Seat) -> tuple[list[str], dict[str, Any]]:
    """Values in the order told; keys of results are not looked at."""
    return values_told(seat.messages)[0], {}


def _heard(seat: Seat) -> tuple[list[str], dict[str, Any]]:
    """Values, the newest first, by no name: what was guessed is forgotten, also where a call took it."""
    return _newest(seat)[0], {}


def _calls(seat: Seat, names: Sequence[str], fill: Fill) -> Generator[Action, Seat, Seat]:
    """Call the tools in order, each filled from the conversation so far; the seat after the last."""
    for name in names:
        seat = yield _call(seat, name, *fill(seat))
    return seat


def _say(text: str) -> Action:
    return Action(content=text)


def _stop(seat: Seat) -> Episode:
    yield from ()


def _refuse(seat: Seat) -> Episode:
    while True:
        yield _say(REFUSAL)


def _ask(seat: Seat) -> Episode:
    wanted = [p for name in seat.plan for p in seat.tools[name].get("parameters", {}).get("properties", {})]
    question = f"Could you tell me the {', the '.join(dict.fromkeys(wanted)).replace('_', ' ') or 'details'}?"
    while True:
        yield _say(question)


def _listen_first(seat: Seat) -> Episode:
    seat = yield _say("One moment, please.")
    yield from _calls(seat, seat.plan, _newest)
    yield _say("Done.")


def _guess_and_listen(seat: Seat) -> Episode:
    yield from _calls(seat, seat.plan, _told)
    seat = yield _say("One moment, please.")
    yield from _calls(seat, seat.plan, _heard)
    yield _say("Done.")


def _repeat(seat: Seat) -> Episode:
    for name in seat.plan:
        tried: list[Mapping[str, Any]] = []
        for _ in range(_TRIES):
            values, named = _newest(seat)
            action = _call(seat, name, values, named)
            if action.tool_calls[0].arguments in tried:
                used = {str(value) for arguments in tried for value in arguments.values()}
                fresh = [value for value in values if value not in used]
                action = _call(seat, name, fresh, accepted_arguments(seat.messages))
            tried.append(action.tool_calls[0].arguments)
            seat = yield action
            if seat.messages[-1].role != "tool" or not _REFUSED.search(seat.messages[-1].content):
                break
    yield _say("Done.")


def _every_tool(seat: Seat) -> Episode:
    yield from _calls(seat, list(seat.tools), _told)
    yield _say("Done.")


def _copy_last(seat: Seat) -> Episode:
    seat = yield from _calls(seat, seat.plan, _newest)
    yield _say((_newest(seat)[0] or ["Done."])[0])


def _copy_known(seat: Seat) -> Episode:
    """Values known beforehand, whatever the request; each episode begins at another one."""
    shift = seat.rng.randrange(len(seat.known))
    values = [*seat.known[shift:], *seat.known[:shift]]
    yield from _calls(seat, seat.plan, lambda now: (values, {}))
    yield _say(", ".join(values[:20]))


LAZY_POLICIES: tuple[LazyPolicy, ...] = (
    LazyPolicy("stop_at_once", "does nothing at all", _stop, planned=False),
    LazyPolicy("refuse_always", "refuses in every turn", _refuse, planned=False),
    LazyPolicy("ask_always", "asks for every argument in every turn and never acts", _ask),
    LazyPolicy(
        "guess_and_listen", "guesses, says a sentence that asks nothing, and uses what it is told", _guess_and_listen
    ),
    LazyPolicy("listen_first", "says a sentence that asks nothing, and uses what it is told", _listen_first),
    LazyPolicy("repeat_until_accepted", "tries one value after another until a call is accepted", _repeat),
    LazyPolicy("call_every_tool_once", "calls every tool with what the request names", _every_tool, planned=False),
    LazyPolicy("copy_last_told", "fills every argument with the values told last", _copy_last),
    LazyPolicy(
        "copy_examples", "fills every argument with values of EXAMPLES or of the target's", _copy_known, "examples"
    ),
    LazyPolicy("words_of_evidence", "answers in the words and values of the evidence", _copy_known, "evidence"),
)
