"""What the synthesis of an environment reads from the target itself: how its tools answer, and what its held-out tasks
are about.

Answers come from episodes of the diagnosis tasks only: the base's own, then, for tools that it never called, the
target's reference solution, then a call with invented arguments, which shows how the tool fails. Held-out tasks are
read to check that scenarios do not repeat them; nothing of them reaches a request to a model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.contract import Action, Environment, Message, Target, TargetTask, ToolCall, canonical_json
from environments.picking import spread
from environments.validation.checks import oracle_policy
from environments.validation.playing import play
from environments.validation.repeats import Source
from tasks.mining.transcripts import reports_error
from tasks.round.target_prompt import scripted

# Characters of a call and of an answer that are shown.
_CALL, _ANSWER = 200, 400
# Diagnosis tasks in which answers are looked for; targets list them family by family, so they are taken at distances.
_TASKS = 60


@dataclass(frozen=True)
class ToolAnswers:
    """A call of a tool with an answer that reports no error, and one with an answer that does; "" where none was
    seen."""

    good: str = ""
    failing: str = ""

    def lines(self) -> str:
        """Both as text for a request."""
        return f"  good: {self.good or '(none seen)'}\n  failing: {self.failing or '(none seen)'}"


def answers_in(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, ToolAnswers]:
    """Tool -> the first good and the first failing answer, from conversations of messages as JSON objects."""
    found: dict[str, ToolAnswers] = {}
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
            shown, now = f"{called} -> {answer[:_ANSWER]}", found.get(name, ToolAnswers())
            if reports_error(answer):
                found[name] = ToolAnswers(now.good, now.failing or shown)
            else:
                found[name] = ToolAnswers(now.good or shown, now.failing)
    return found


def tool_answers(
    target: Target, conversations: Sequence[Sequence[Mapping[str, Any]]], tools: Sequence[Mapping[str, Any]]
) -> dict[str, ToolAnswers]:
    """A good and a failing answer of every tool in `tools`, where the target gives one.

    `conversations` are the round's own episodes of the diagnosis tasks. Episodes that the target cannot play to their
    end are used as far as they went.
    """
    found = answers_in(conversations)
    names = [str(tool["function"]["name"]) for tool in tools]
    target = scripted(target)
    tasks = spread(target.tasks("diagnosis"), _TASKS)
    environment = target.environment()
    try:
        for task in tasks:
            if all(found.get(name, ToolAnswers()).good for name in names):
                break
            _add(found, play(environment, task, oracle_policy).messages)
        for task in tasks:
            wanted = [name for name in names if not found.get(name, ToolAnswers()).failing]
            if not wanted:
                break
            _add(found, play(environment, task, _Inventing(wanted)).messages)
    finally:
        environment.close()
    return {name: found.get(name, ToolAnswers()) for name in names}


def held_out_sources(target: Target, tasks: Sequence[TargetTask]) -> tuple[Source, ...]:
    """What each held-out task is about: what its user says and what the reference solution fills in."""
    environment = scripted(target).environment()
    sources = []
    try:
        for task in tasks:
            messages = play(environment, task, oracle_policy).messages
            said = [message.content for message in messages if message.role == "user"]
            given = [canonical_json(dict(call.arguments)) for message in messages for call in message.tool_calls]
            sources.append(Source("a held-out task of the target", "\n".join([*said, *given])))
    finally:
        environment.close()
    return tuple(sources)


class _Inventing:
    """Calls each wanted tool that the task offers, with arguments that name nothing."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = wanted

    def __call__(self, environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        turn = sum(message.role == "assistant" for message in messages)
        offered = [tool["function"] for tool in environment.tools if tool["function"]["name"] in self._wanted]
        if turn >= len(offered):
            return None
        schema = offered[turn].get("parameters", {})
        properties = schema.get("properties", {})
        arguments = {name: _invented(properties.get(name, {})) for name in schema.get("required", ())}
        return Action(tool_calls=(ToolCall(str(offered[turn]["name"]), arguments, f"call_{turn}"),))


def _invented(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    simple = {"integer": 987654321, "number": 987654321, "boolean": True, "object": {}}
    if kind in simple:
        return simple[str(kind)]
    return [_invented(schema.get("items", {}))] if kind == "array" else "no_such_value"


def _add(found: dict[str, ToolAnswers], messages: Sequence[Message]) -> None:
    for name, seen in answers_in([[message.as_dict() for message in messages]]).items():
        now = found.get(name, ToolAnswers())
        found[name] = ToolAnswers(now.good or seen.good, now.failing or seen.failing)
