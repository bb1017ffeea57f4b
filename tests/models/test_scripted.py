"""What policies without a model do with whatever a conversation holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from environments.contract import Message
from models.scripted import RandomPolicy


def test_a_digit_that_is_no_number_is_a_word() -> None:
    """A 10² has digits alone and is no number: an evaluation ended in a traceback."""
    parameters = {"type": "object", "properties": {"tiles": {"type": "integer"}}}
    environment: Any = SimpleNamespace(tools=({"function": {"name": "lay", "parameters": parameters}},))
    said = [Message("user", "10² ① 5")]
    actions = [RandomPolicy().act(environment, said, seed) for seed in range(50)]
    assert {call.arguments["tiles"] for action in actions for call in action.tool_calls} == {5}
