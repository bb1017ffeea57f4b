"""Environments around an environment that has nothing to offer before it is reset, and more after its first step: the
contract allows both."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import Action, Message, Observation, Prompt, TargetTask
from environments.synthesized.composed import DenseEnvironment
from environments.synthesized.hints import Advised
from environments.synthesized.written import TargetLike
from environments.wrapping import WrappedEnvironment
from errors import EnvironmentFault
from models.episodes import Guarded
from tasks.methods.seed.prompts import PromptedEnvironment, Prompting


class OfferedLate:
    max_steps = 3

    def reset(self, task: TargetTask) -> Observation:
        self.tools = ({"type": "function", "function": {"name": "do"}},)
        self.instructions, self.examples = "Do.", ()
        return Observation((Message("user", "Now."),))

    def step(self, action: Action) -> Observation:
        self.tools = (*self.tools, {"type": "function", "function": {"name": "undo"}})
        return Observation((Message("tool", "Done; you may undo it."),))


def dense(inner: Any) -> DenseEnvironment:
    unused: Any = None
    return DenseEnvironment(inner, unused)


def prompted(inner: Any) -> PromptedEnvironment:
    return PromptedEnvironment(inner, Prompting())


def target_like(inner: Any) -> TargetLike:
    """The environment of a written one, in which a task of the target is played."""
    source: Any = SimpleNamespace(
        prompt=Prompt("", (), ()),
        module=SimpleNamespace(max_steps=3),
        own=lambda task: False,
        target=SimpleNamespace(environment=lambda: inner),
        references=None,
    )
    return TargetLike(source)


@pytest.mark.parametrize("around", [WrappedEnvironment, dense, Advised, Guarded])
def test_what_is_offered_at_reset_is_handed_through(around: Callable[[Any], Any]) -> None:
    """The stage that synthesizes ended with an attribute that a class of the project lacked."""
    environment = around(OfferedLate())
    assert not hasattr(environment, "tools")
    environment.reset(TargetTask("t", "diagnosis", "f", 1, {}))
    assert (environment.instructions, tuple(environment.examples), environment.max_steps) == ("Do.", (), 3)
    assert [tool["function"]["name"] for tool in environment.tools] == ["do"]


@pytest.mark.parametrize("around", [WrappedEnvironment, dense, Advised, Guarded, prompted, target_like])
def test_a_tool_that_is_offered_in_a_later_turn_is_handed_through(around: Callable[[Any], Any]) -> None:
    """Else training, calibration and GEPA read a right call with the tools of the first turn."""
    environment = around(OfferedLate())
    environment.reset(TargetTask("t", "diagnosis", "f", 1, {}))
    environment.step(Action(content="Do."))
    assert [tool["function"]["name"] for tool in environment.tools] == ["do", "undo"]


def test_what_is_offered_in_a_later_turn_and_is_no_tool_is_refused() -> None:
    inner: Any = OfferedLate()
    environment = Guarded(inner)
    environment.reset(TargetTask("t", "diagnosis", "f", 1, {}))
    environment.step(Action(content="Do."))
    with pytest.raises(EnvironmentFault, match="tools hold two of the name 'undo'"):
        environment.step(Action(content="Do."))
