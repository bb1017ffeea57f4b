"""What the synthesis of an environment reads from the target itself: how its tools answer, and what its held-out tasks
are about.

Answers come from episodes of the diagnosis tasks only: the base's own, then, for tools that it never called, the
target's reference solution, then a call with arguments that others of it have or were told, then a call with invented
arguments, which shows how the tool fails. Where a target has no tools, what its verifier says of an answer stands for
them. Held-out tasks are read to check that scenarios do not repeat them; nothing of them reaches a request to a model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from db import CheckRow, TrajectoryRow
from environments.contract import Action, Check, Environment, Message, Target, TargetTask, ToolCall, canonical_json
from environments.picking import spread
from environments.targets.catalogue import with_scripted_user
from environments.validation.checks import constant_policy
from environments.validation.lazy import values_told
from environments.validation.playing import ENOUGH_FAULTS, SimplePolicy, oracle_policy, play
from environments.validation.repeats import Source
from errors import CallOverdue
from models.episodes import Guarded
from tasks.mining.transcripts import reports_error

# Characters of a call and of an answer that are shown.
_CALL, _ANSWER = 200, 400
# Characters of a request and of an answer before a verdict, each.
_SAID = 300
# Diagnosis tasks in which answers are looked for; targets list them family by family, so they are taken at distances.
_TASKS = 60


@dataclass(frozen=True)
class ToolAnswers:
    """A call of a tool with an answer that reports no error, and one with an answer that does; of a kind of check, an
    answer of the agent that passed it, and one that did not. "" where none was seen."""

    good: str = ""
    failing: str = ""

    def lines(self) -> str:
        """Both as text for a request."""
        return f"  good: {self.good or '(none seen)'}\n  failing: {self.failing or '(none seen)'}"


def answers_in(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, ToolAnswers]:
    """Tool -> the first good and the first failing answer, from conversations of messages as JSON objects."""
    answers: dict[str, ToolAnswers] = {}
    for messages in conversations:
        calls: dict[str, tuple[str, str]] = {}
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = call.get("function", call)
                name, given = str(function["name"]), function.get("arguments", {})
                text = given if isinstance(given, str) else canonical_json(given)
                calls[str(call.get("id", ""))] = name, f"{name} {text}"[:_CALL]
            if message["role"] != "tool" or str(message.get("tool_call_id", "")) not in calls:
                continue
            name, called = calls[str(message["tool_call_id"])]
            answer = str(message.get("content", ""))
            shown, now = f"{called} -> {answer[:_ANSWER]}", answers.get(name, ToolAnswers())
            if reports_error(answer):
                answers[name] = ToolAnswers(now.good, now.failing or shown)
            else:
                answers[name] = ToolAnswers(now.good or shown, now.failing)
    return answers


def tool_answers(
    target: Target, conversations: Sequence[Sequence[Mapping[str, Any]]], tools: Sequence[Mapping[str, Any]]
) -> dict[str, ToolAnswers]:
    """A good and a failing answer of every tool in `tools`, where the target gives one.

    `conversations` are the round's own episodes of the diagnosis tasks. Episodes that the target cannot play to their
    end are used as far as they went; where it hangs in several of a kind, no more of them are tried.
    """
    answers = answers_in(conversations)
    names = [str(tool["function"]["name"]) for tool in tools]
    target = with_scripted_user(target)
    environment = Guarded.made(target.environment)
    # Whose calls show which side of an answer; each plays until every tool has that side.
    ways: list[tuple[str, Callable[[Sequence[str]], SimplePolicy]]] = [
        ("good", lambda wanted: oracle_policy),
        ("good", _Borrowing),
        ("failing", _Inventing),
    ]
    try:
        for side, policy in ways:
            overdue = 0
            for task in spread(target.tasks("diagnosis"), _TASKS):
                wanted = [name for name in names if not getattr(answers.get(name, ToolAnswers()), side)]
                if not wanted or overdue >= ENOUGH_FAULTS:
                    break
                played = play(environment, task, policy(wanted))
                overdue += played.error.startswith(CallOverdue.__name__)
                _add(answers, played.messages)
    finally:
        environment.close()
    return {name: answers.get(name, ToolAnswers()) for name in names}


def judged_answers(target: Target, rows: Sequence[TrajectoryRow]) -> dict[str, ToolAnswers]:
    """Kind of check -> an answer of the agent that passed it and one that did not, each with its request and with what
    the verifier said. For a target without tools. `rows` are the round's own episodes of the diagnosis tasks; what they
    do not show is taken from the reference solution, and from an agent that knows nothing."""
    answers: dict[str, ToolAnswers] = {}
    for row in rows:
        _judge(answers, row.messages, row.checks)
    target = with_scripted_user(target)
    environment = Guarded.made(target.environment)
    try:
        for policy in (oracle_policy, constant_policy("I do not know.")):
            for task in spread(target.tasks("diagnosis"), _TASKS):
                played = play(environment, task, policy)
                if played.score is not None:
                    _judge(answers, [message.as_dict() for message in played.messages], played.score.checks)
    finally:
        environment.close()
    return answers


def held_out_sources(target: Target, tasks: Sequence[TargetTask]) -> tuple[Source, ...]:
    """What each held-out task is about: what its user says and what the reference solution fills in."""
    environment = Guarded.made(with_scripted_user(target).environment)
    sources = []
    try:
        for task in tasks:
            messages = play(environment, task, oracle_policy).messages
            said = [message.content for message in messages if message.role == "user"]
            given = [canonical_json(dict(call.arguments)) for message in messages for call in message.tool_calls]
            opening = messages[0].content if messages else ""
            sources.append(Source("a held-out task of the target", "\n".join([*said, *given]), opening=opening))
    finally:
        environment.close()
    return tuple(sources)


class _Borrowing:
    """Plays the reference solution, and before each turn of it tries the wanted tools whose arguments are all known by
    their names: from the reference's next call, and from what tools told."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = wanted
        self._tried: list[ToolCall] = []

    def __call__(self, environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        action = environment.oracle()
        known = values_told(messages)[1]
        for call in action.tool_calls if action else ():
            known |= call.arguments
        for function in _offered(environment, self._wanted):
            needs = function.get("parameters", {}).get("required", ())
            borrowed = ToolCall(str(function["name"]), {name: known[name] for name in needs if name in known})
            if needs and len(borrowed.arguments) == len(needs) and borrowed not in self._tried:
                self._tried.append(borrowed)
                return Action(tool_calls=(replace(borrowed, id=f"call_{len(messages)}"),))
        return action


class _Inventing:
    """Calls each wanted tool that the task offers: with arguments that name nothing, then with one that it has not, for
    tools that take any value or none."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = wanted

    def __call__(self, environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        turn = sum(message.role == "assistant" for message in messages)
        offered = _offered(environment, self._wanted)
        if turn >= 2 * len(offered):
            return None
        function, extra = offered[turn % len(offered)], turn >= len(offered)
        schema = function.get("parameters", {})
        properties = schema.get("properties", {})
        arguments = {name: _invented(properties.get(name, {})) for name in schema.get("required", ())}
        arguments |= {"no_such_argument": "no_such_value"} if extra else {}
        return Action(tool_calls=(ToolCall(str(function["name"]), arguments, f"call_{turn}"),))


def _offered(environment: Environment, wanted: Sequence[str]) -> list[Mapping[str, Any]]:
    return [tool["function"] for tool in environment.tools if tool["function"]["name"] in wanted]


def _invented(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    simple = {"integer": 987654321, "number": 987654321, "boolean": True, "object": {}}
    if kind in simple:
        return simple[str(kind)]
    return [_invented(schema.get("items", {}))] if kind == "array" else "no_such_value"


def _judge(
    answers: dict[str, ToolAnswers], messages: Sequence[Mapping[str, Any]], checks: Sequence[CheckRow | Check]
) -> None:
    """Add what an episode shows of each kind of check that it has a required one of; nothing where nobody answered."""
    replies = [str(message.get("content", "")) for message in messages if message["role"] == "assistant"]
    requests = [str(message.get("content", "")) for message in messages if message["role"] == "user"]
    if not replies or not requests:
        return
    # The examples of a prompt stand in front: the last request is the one that was answered.
    before = f"{_short(requests[-1])} -> {_short(replies[-1])}"
    for check in checks:
        if not check.required:
            continue
        now = answers.get(check.kind, ToolAnswers())
        if check.passed:
            answers[check.kind] = ToolAnswers(now.good or f"{before} -> {check.name} passed", now.failing)
        else:
            why = f": {_short(check.detail)}" if check.detail else ""
            answers[check.kind] = ToolAnswers(now.good, now.failing or f"{before} -> {check.name} FAILED{why}")


def _short(text: str) -> str:
    """The end of a text, in one line: a question stands below what it is about."""
    line = " ".join(text.split())
    return line if len(line) <= _SAID else f"...{line[-_SAID:]}"


def _add(answers: dict[str, ToolAnswers], messages: Sequence[Message]) -> None:
    for name, seen in answers_in([[message.as_dict() for message in messages]]).items():
        now = answers.get(name, ToolAnswers())
        answers[name] = ToolAnswers(now.good or seen.good, now.failing or seen.failing)
