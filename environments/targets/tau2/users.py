"""The simulated customer: scripted (no model; for tests and for rollouts without a key) or played by a model.

Scores depend on who plays it, so its name is part of the target's data hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tau2.data_model.tasks import Action as GoldAction
from tau2.data_model.tasks import StructuredUserInstructions, Task
from tau2.user.user_simulator import UserSimulator

from environments.contract import ToolCall
from environments.targets.tau2.world import Domain
from environments.targets.third_party.simulated_user import FactTeller, UserModel, in_first_person
from errors import ProviderError

STOP, TRANSFER, OUT_OF_SCOPE = "###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"
GREETING = "Hi! How can I help you today?"


class Customer(Protocol):
    """One customer of one episode. `next` returns its turn: text, or calls of its own (phone) tools."""

    def next(self) -> tuple[str, tuple[ToolCall, ...]]: ...
    def hear(self, text: str) -> None: ...
    def see(self, call: ToolCall, result: str) -> None: ...
    def transferred(self) -> None: ...


def build_customer(model: UserModel | None, task: Task, domain: Domain) -> Customer:
    """The customer of a task: played by `model`, or the scripted one without it."""
    if model is None:
        return ScriptedCustomer(task, [tool["function"]["name"] for tool in domain.user_tools])
    return ModelCustomer(task, domain, model)


def facts(task: Task) -> list[str]:
    """What the scenario lets the customer say, in the order in which the scripted one says it."""
    told = task.user_scenario.instructions
    if not isinstance(told, StructuredUserInstructions):
        return [in_first_person(told)]
    parts = [
        told.reason_for_call,
        "\n".join(part for part in (told.known_info, told.unknown_info) if part),
        told.task_instructions,
    ]
    return [in_first_person(part) for part in parts if part and part.strip()]


class ScriptedCustomer:
    """Tells the scenario's facts, one part a turn; does what the agent names on the phone; then agrees, then leaves.

    1. The first turn is the reason for the call; each further message of the agent brings the next part.
    2. Named user tools (`toggle_data` or "toggle data") are called in the order in which the agent names them, with the
       arguments that the scenario has for them, else those written as `name=value`; the results are read back.
    3. With nothing left to tell, a question is answered "yes" (at most 8 times); any other message ends the call.
    4. After a transfer to a human it leaves with ###TRANSFER###.
    """

    def __init__(self, task: Task, tools: Sequence[str]) -> None:
        gold = (task.evaluation_criteria.actions if task.evaluation_criteria else None) or []
        self._gold = [action for action in gold if action.requestor == "user"]
        self._tools, self._facts = tools, FactTeller(facts(task))
        self._heard, self._results, self._human = "", list[str](), False
        self._queue: list[ToolCall] = []

    def hear(self, text: str) -> None:
        self._heard = text
        self._queue = phone_calls(text, self._tools, self._gold)

    def see(self, call: ToolCall, result: str) -> None:
        self._results.append(f"{call.name}: {result}")

    def transferred(self) -> None:
        self._human = True

    def next(self) -> tuple[str, tuple[ToolCall, ...]]:
        if self._human:
            return TRANSFER, ()
        if self._queue:
            calls, self._queue = tuple(self._queue), []
            return "", calls
        if self._results:
            told, self._results = "\n".join(self._results), []
            return told, ()
        return self._facts.reply(self._heard) or STOP, ()


def phone_calls(text: str, tools: Sequence[str], gold: Sequence[GoldAction]) -> list[ToolCall]:
    """The user tools that a message names, in order, with arguments (see ScriptedCustomer, rule 2)."""
    lowered = text.lower()
    named: list[tuple[int, str]] = []
    for tool in tools:
        pattern = rf"(?<![a-z0-9_])(?:{tool}|{tool.replace('_', ' ')})(?![a-z0-9_])"
        named += [(match.start(), tool) for match in re.finditer(pattern, lowered)]
    named.sort()
    calls = []
    for index, (start, tool) in enumerate(named):
        end = named[index + 1][0] if index + 1 < len(named) else len(text)
        calls.append(ToolCall(tool, _arguments(text[start:end], tool, gold)))
    return calls


def _arguments(text: str, tool: str, gold: Sequence[GoldAction]) -> dict[str, Any]:
    for action in gold:
        if action.name == tool and all(str(value).lower() in text.lower() for value in action.arguments.values()):
            return dict(action.arguments)
    return {key: value.strip("'\"") for key, value in re.findall(r"(\w+)\s*=\s*('[^']*'|\"[^\"]*\"|[\w.\-]+)", text)}


class ModelCustomer:
    """A model with tau2's own guidelines and scenario prompt. Roles are flipped: the customer is the assistant."""

    def __init__(self, task: Task, domain: Domain, complete: UserModel) -> None:
        tools = list(domain.user_tools) or None
        # Only for its prompt: tau2's own simulator swallows provider errors in the gym, and reads a disk cache.
        prompt = UserSimulator(tools=tools, instructions=str(task.user_scenario), llm="unused").system_prompt
        self._messages: list[Mapping[str, Any]] = [
            {"role": "system", "content": prompt},
            {"role": "user", "content": GREETING},
        ]
        self._tools, self._complete, self._calls = list(domain.user_tools), complete, 0

    def hear(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def see(self, call: ToolCall, result: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    def transferred(self) -> None:
        """The prompt tells the model what to do; it sees the agent's words only."""

    def next(self) -> tuple[str, tuple[ToolCall, ...]]:
        text, calls = self._complete(self._messages, self._tools)
        if calls and not self._tools:
            raise ProviderError(
                "the simulated user called a tool in a domain where users have none; try again", transient=True
            )
        if calls:
            self._messages.append(
                {"role": "assistant", "content": text or None, "tool_calls": [_openai_call(call) for call in calls]}
            )
        else:
            self._messages.append({"role": "assistant", "content": text})
        return text, calls


def _openai_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
    }
