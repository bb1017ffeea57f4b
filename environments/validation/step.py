"""The oracle without the capability's step: an environment in which it still succeeds does not need the capability.

A module names the step (`STEP`); this side takes it out. The oracle is played once to record what it does, then the
same actions are played again without the step. An oracle sees the hidden state, so leaving a question or a look-up out
is not enough: what only the step's answer told is replaced in later arguments and messages by the oracle's value of
another scenario, which is what an agent that skipped the step could at best make up.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from environments.contract import Action, Environment, Message, TargetTask, ToolCall, canonical_json
from environments.validation.playing import play

SAYS = ("ask", "answer")
STEP_HELP = (
    'STEP must be {"tool": name}, {"tool": name, "argument": name}, {"say": "ask"} or {"say": "answer"}: '
    "the step of the oracle that is the capability"
)
_WORD = re.compile(r"[\w][\w.@:/-]*\w|\w")


@dataclass(frozen=True)
class Deed:
    """One action of the oracle, and the text that answered it."""

    action: Action
    answer: str


def step_fault(step: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with a module's `STEP`; "" when the pipeline can take that step out."""
    if not isinstance(step, Mapping) or not all(isinstance(value, str) for value in step.values()):
        return STEP_HELP
    if set(step) == {"say"}:
        return "" if step["say"] in SAYS else STEP_HELP
    if set(step) not in ({"tool"}, {"tool", "argument"}):
        return STEP_HELP
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    if step["tool"] not in schemas:
        return f"STEP names the tool {step['tool']!r}, which TOOLS has not"
    known = schemas[step["tool"]].get("properties", {})
    if "argument" in step and step["argument"] not in known:
        return (
            f"STEP names the argument {step['argument']!r}, which {step['tool']!r} has not; it has {', '.join(known)}"
        )
    return ""


def recorded(environment: Environment, task: TargetTask) -> list[Deed]:
    """What the oracle does in `task`, action by action (up to a fault, where there is one)."""
    actions: list[Action] = []
    answers: list[str] = []
    seen = 0

    def policy(env: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        nonlocal seen
        if actions:
            answers.append("\n".join(m.content for m in messages[seen:] if m.role != "assistant"))
        seen = len(messages)
        action = env.oracle()
        if action is not None:
            actions.append(action)
        return action

    played = play(environment, task, policy)
    # The last action of an episode that it ended was never looked back at.
    answers.append("\n".join(m.content for m in played.messages[seen:] if m.role != "assistant"))
    return [Deed(action, answer) for action, answer in zip(actions, answers, strict=False)]


def without_step(
    step: Mapping[str, str], request: str, deeds: Sequence[Deed], donors: Sequence[Sequence[Deed]]
) -> list[Action]:
    """The oracle's actions in a scenario that begins with `request`, without the step.

    `donors` are its deeds in other scenarios, from which made-up values are taken. Equal to the oracle's own actions
    where it does not take the step, or where no donor has another value.
    """
    places = _places(step, deeds)
    if not places:
        return [deed.action for deed in deeds]
    donated = [d for d in donors if d is not deeds]
    if "argument" in step:
        return [_other_argument(d.action, step, donated) if i in places else d.action for i, d in enumerate(deeds)]
    if step.get("say") == "answer":
        return [_other_answer(d.action, donated) if i in places else d.action for i, d in enumerate(deeds)]
    open_text = "\n".join([request, *(d.answer for i, d in enumerate(deeds) if i < min(places))])
    hidden = set(_words("\n".join(deeds[i].answer for i in places))) - set(_words(open_text))
    actions: list[Action] = []
    for i, deed in enumerate(deeds):
        action = deed.action
        if i in places:
            kept = tuple(call for call in action.tool_calls if call.name != step.get("tool"))
            if not kept:
                continue
            action = replace(action, tool_calls=kept)
        actions.append(_unlearned(action, hidden, donated) if i > min(places) else action)
    return actions


def _places(step: Mapping[str, str], deeds: Sequence[Deed]) -> set[int]:
    """Indices of the deeds that are the step."""
    if "tool" in step:
        return {i for i, deed in enumerate(deeds) if any(call.name == step["tool"] for call in deed.action.tool_calls)}
    said = [i for i, deed in enumerate(deeds) if not deed.action.tool_calls]
    # A message that something follows was said for its answer; the last deed, if it is a message, ends the episode.
    last = len(deeds) - 1
    return {i for i in said if i == last} if step["say"] == "answer" else {i for i in said if i != last}


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _calls(deeds: Sequence[Deed], name: str) -> list[ToolCall]:
    return [call for deed in deeds for call in deed.action.tool_calls if call.name == name]


def _other_argument(action: Action, step: Mapping[str, str], donors: Sequence[Sequence[Deed]]) -> Action:
    """The action with the step's argument as the oracle gives it in another scenario."""

    def changed(call: ToolCall) -> ToolCall:
        if call.name != step["tool"] or step["argument"] not in call.arguments:
            return call
        value = call.arguments[step["argument"]]
        given = [c.arguments.get(step["argument"]) for deeds in donors for c in _calls(deeds, call.name)]
        other = next((v for v in given if v is not None and canonical_json(v) != canonical_json(value)), value)
        return replace(call, arguments={**call.arguments, step["argument"]: other})

    return replace(action, tool_calls=tuple(changed(call) for call in action.tool_calls))


def _other_answer(action: Action, donors: Sequence[Sequence[Deed]]) -> Action:
    texts = [deeds[-1].action.content for deeds in donors if deeds and not deeds[-1].action.tool_calls]
    return replace(action, content=next((text for text in texts if text != action.content), "Done."))


def _unlearned(action: Action, hidden: set[str], donors: Sequence[Sequence[Deed]]) -> Action:
    """The action with every word that only the step told replaced."""

    def changed(call: ToolCall) -> ToolCall:
        given = [c.arguments for deeds in donors for c in _calls(deeds, call.name)]
        arguments = {
            name: _made_up(value, hidden, [a[name] for a in given if name in a])
            for name, value in call.arguments.items()
        }
        return replace(call, arguments=arguments)

    content = _WORD.sub(lambda found: _scrambled(found[0]) if found[0] in hidden else found[0], action.content)
    return replace(action, content=content, tool_calls=tuple(changed(call) for call in action.tool_calls))


def _made_up(value: Any, hidden: set[str], given: Sequence[Any]) -> Any:
    """The value when none of its words was hidden, else another one: a donor's, or digits and letters moved on."""
    if not hidden.intersection(_words(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))):
        return value
    other = [g for g in given if canonical_json(g) != canonical_json(value)]
    if other:
        return other[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _scrambled(str(value)) if not isinstance(value, bool) else not value
    return value + 1


def _scrambled(text: str) -> str:
    """Every digit and letter moved on by one: of the same shape, and another text."""
    moved = {"9": "0", "z": "a", "Z": "A"}
    return "".join(moved.get(c) or (chr(ord(c) + 1) if c.isascii() and c.isalnum() else c) for c in text)
