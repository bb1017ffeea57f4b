"""Turns that cannot say the target's own solutions are refused before anything is played."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import Action, Message, Observation, TargetTask, ToolCall
from errors import ConfigurationError, EnvironmentFault
from models.templates.call_formats import FORMATS
from tasks.operations.turn_length import check_turn_length


class Sentences:
    """The solution of a task is one sentence of as many words as its number says, or the calls that it names; -1 has
    none, -2 does not open, and -3 asks for a record that is not there."""

    instructions = ""
    examples: Sequence[Message] = ()
    max_steps = 2
    tools = ({"function": {"name": "look", "parameters": {"properties": {"key": {"type": "string"}}}}},)

    def reset(self, task: TargetTask) -> Observation:
        self.words = int(task.payload["words"])
        self.calls: Sequence[ToolCall] = task.payload["calls"]
        if self.words == -2:
            raise EnvironmentFault("broken")
        if self.words == -3:
            raise KeyError("no such record")
        return Observation((Message("user", "Say."),))

    def step(self, action: Action) -> Observation:
        self.words = -1
        return Observation((), done=True)

    def oracle(self) -> Action | None:
        if self.words < 0:
            return None
        return Action(tool_calls=tuple(self.calls)) if self.calls else Action(content=" ".join(["word"] * self.words))

    def close(self) -> None:
        return None


def context(words: list[int], most: int, calls: Sequence[Sequence[ToolCall]] = (), form: str = "compact") -> Any:
    payloads = [{"words": n, "calls": calls[i] if i < len(calls) else ()} for i, n in enumerate(words)]
    tasks = [TargetTask(f"t{i}", "diagnosis", "f", i, payload) for i, payload in enumerate(payloads)]
    written = FORMATS[form]()
    renderer = SimpleNamespace(
        text_ids=str.split,
        content=lambda message, tools: written.write(message.content, message.tool_calls, tools),
        calls=written,
    )
    return SimpleNamespace(
        settings=SimpleNamespace(rollout=SimpleNamespace(max_tokens=most)),
        round=SimpleNamespace(target="sentences"),
        base=SimpleNamespace(renderer=renderer),
        target=SimpleNamespace(environment=Sentences),
        tasks=lambda split: tasks,
    )


def test_turns_that_are_too_short_for_many_tasks_are_refused_with_a_length_that_is_enough() -> None:
    lengths = [10] * 14 + [30] * 6
    with pytest.raises(ConfigurationError, match=r"max_tokens = 20, and 6 of 20 .* of sentences .* up to 31.*least 31"):
        check_turn_length(context(lengths, 20))
    check_turn_length(context(lengths, 31))  # the end of the turn is a token too


def test_the_length_that_a_refusal_names_is_enough_however_few_solutions_there_are() -> None:
    refusals, most = 0, 8
    for n in (*range(1, 12), 20, 29, 40):
        for words in ([10] * (n - 1) + [100], [5] * (n - n // 3) + [90] * (n // 3), list(range(5, 5 + n))):
            try:
                check_turn_length(context(words, most))
            except ConfigurationError as refused:
                refusals += 1
                enough = int(str(refused).rpartition(" ")[2])
                assert enough > most
                check_turn_length(context(words, enough))
    assert refusals > 30


def test_a_few_long_solutions_are_told_and_played_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trace"):
        check_turn_length(context([10] * 18 + [30, 40], 20))
    assert "2 of 20" in caplog.text
    assert "up to 41" in caplog.text


def test_tasks_without_a_solution_say_nothing() -> None:
    check_turn_length(context([-1, -2, -3] * 10, 1))
    check_turn_length(context([], 1))


def test_calls_that_the_format_changes_are_refused_with_the_format_that_keeps_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    look, other = ToolCall("look", {"key": "a"}), ToolCall("look", {"key": 'b, "c"\n'})
    with pytest.raises(
        ConfigurationError, match=r'calls = "compact", and 3 of 20 .* as look\(a\): .*set calls = "json"'
    ):
        check_turn_length(context([1] * 20, 20, [(look, other)] * 3))
    check_turn_length(context([1] * 20, 20, [(look,), (other,)] * 10))
    check_turn_length(context([1] * 20, 20, [(look, other)] * 3, "json"))
    assert not caplog.text
    with caplog.at_level(logging.WARNING, "trace"):
        check_turn_length(context([1] * 20, 20, [(look, other)] * 2))
    assert "2 of 20" in caplog.text


class LoggingIn(Sentences):
    """Offers the call that the solution ends with once its first one was made."""

    def reset(self, task: TargetTask) -> Observation:
        self.tools, self.turns = (tool("login", "pin"),), 0
        return Observation((Message("user", "Pay 5 to 7."),))

    def step(self, action: Action) -> Observation:
        self.turns += 1
        self.tools = (tool("login", "pin"), tool("pay", "amount", "to"))
        return Observation((Message("tool", "You may pay now."),), done=self.turns == 2)

    def oracle(self) -> Action | None:
        calls = (ToolCall("login", {"pin": 1}), ToolCall("pay", {"amount": 5, "to": 7}))
        return Action(tool_calls=(calls[self.turns],))


def tool(name: str, *parameters: str) -> Any:
    return {"function": {"name": name, "parameters": {"properties": {p: {"type": "integer"} for p in parameters}}}}


def test_a_call_of_a_tool_that_a_later_turn_offers_is_read_with_the_tools_of_that_turn() -> None:
    given = context([1, 1], 20)
    given.target.environment = LoggingIn
    check_turn_length(given)
