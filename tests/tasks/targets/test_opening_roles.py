"""A target that opens as no model can be shown it is refused before anything is played."""

from __future__ import annotations

import logging

import pytest

from environments.contract import Message, Observation, TargetTask
from errors import TargetError
from settings import Settings
from tasks.targets.looks import look_over
from tasks.targets.openings import check_openings
from tests.tasks.counting_target import Counting
from tests.tasks.targets.test_repeats import Of

GREETING = Message("assistant", "Hello, how can I help you?")


class Greeting(Counting):
    def reset(self, task: TargetTask) -> Observation:
        return Observation((GREETING, *super().reset(task).messages))


class GreetingOnce(Counting):
    def reset(self, task: TargetTask) -> Observation:
        asked = super().reset(task).messages
        return Observation((GREETING, *asked) if task.id == "t1" else asked)


class Worked(Counting):
    """A user's turn, the agent's and its result, before the customer's."""

    examples = (Message("user", "Count 7."), GREETING, Message("tool", "counted"), GREETING)


class Doubled(Counting):
    examples = (Message("user", "Count 7."),)


def test_a_target_that_begins_with_the_agents_greeting_is_refused() -> None:
    """The dry run let it pass, and every episode of the round was lost."""
    with pytest.raises(
        TargetError, match=r"20 of 20 tasks .* task 't0' has a turn of 'assistant' behind one of 'system'"
    ):
        look_over(Settings(), Of(Greeting))
    with pytest.raises(TargetError, match="a turn of 'user' behind one of 'user'"):
        check_openings(Of(Doubled))


def test_what_a_few_tasks_open_with_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trace"):
        check_openings(Of(Counting))
        check_openings(Of(Worked))
        assert caplog.text == ""
        check_openings(Of(GreetingOnce))
    assert "1 of 20 tasks of 'counting' that were looked at open with roles" in caplog.text
    assert "task 't1' has a turn of 'assistant' behind one of 'system'" in caplog.text
