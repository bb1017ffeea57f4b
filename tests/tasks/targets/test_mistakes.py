"""A target that raises on what an agent did wrong is told of before a round loses episodes to it."""

from __future__ import annotations

import logging

import pytest

from environments.contract import Action, Observation
from tasks.targets import mistakes
from tasks.targets.mistakes import LOOKED_AT, check_mistakes
from tests.tasks.counting_target import Counting
from tests.tasks.targets.test_repeats import Of


class Answering(Counting):
    """Whatever an agent does is answered."""

    def step(self, action: Action) -> Observation:
        return super().step(Action(tool_calls=action.tool_calls[:1], content=action.content))


class Strict(Answering):
    """It takes for granted that every call has its argument."""

    def step(self, action: Action) -> Observation:
        for call in action.tool_calls:
            assert call.arguments["n"] is not None
        return super().step(action)


class Unreading(Answering):
    def step(self, action: Action) -> Observation:
        if action.malformed:
            raise ValueError(action.malformed)
        return super().step(action)


def told(kind: type[Counting], caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trace"):
        check_mistakes(Of(kind))
    return caplog.text


def test_a_mistake_that_ends_an_episode_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistakes, "SECONDS", 60.0)
    tried = LOOKED_AT * len(mistakes._MISTAKES)
    said = told(Strict, caplog)
    assert f" of {tried} episodes of counting in which an agent makes mistakes ended in a fault of the environ" in said
    assert "task 't0', tools called that there are not: EnvironmentFault: the environment's step raised Key" in said
    said = told(Unreading, caplog)
    assert f"{LOOKED_AT} of {tried} episodes" in said
    assert "calls that cannot be read: EnvironmentFault: the environment's step raised ValueError" in said
    assert told(Answering, caplog) == ""
    monkeypatch.setattr(mistakes, "is_builtin", lambda target: True)
    assert told(Strict, caplog) == "", "ours have tests"


def test_every_mistake_is_one_of_the_red_teams() -> None:
    assert set(mistakes._MISTAKES) <= {attack.name for attack in mistakes.ATTACKS}
