"""Environments around an environment that has nothing to offer before it is reset, as the contract allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from environments.contract import Message, Observation, TargetTask
from environments.synthesized.composed import DenseEnvironment
from environments.synthesized.hints import Advised
from environments.wrapping import WrappedEnvironment
from models.episodes import Guarded


class OfferedLate:
    max_steps = 3

    def reset(self, task: TargetTask) -> Observation:
        self.tools = ({"type": "function", "function": {"name": "do"}},)
        self.instructions, self.examples = "Do.", ()
        return Observation((Message("user", "Now."),))


def dense(inner: Any) -> DenseEnvironment:
    unused: Any = None
    return DenseEnvironment(inner, unused)


@pytest.mark.parametrize("around", [WrappedEnvironment, dense, Advised, Guarded])
def test_what_is_offered_at_reset_is_handed_through(around: Callable[[Any], Any]) -> None:
    """The stage that synthesizes ended with an attribute that a class of the project lacked."""
    environment = around(OfferedLate())
    assert not hasattr(environment, "tools")
    environment.reset(TargetTask("t", "diagnosis", "f", 1, {}))
    assert (environment.instructions, tuple(environment.examples), environment.max_steps) == ("Do.", (), 3)
    assert [tool["function"]["name"] for tool in environment.tools] == ["do"]
