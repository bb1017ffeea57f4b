"""A target whose episodes leave something to the next is told of before a round plays any."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from environments.contract import Action, Observation, TargetTask
from tasks.targets import repeats
from tasks.targets.repeats import LOOKED_AT, check_repeats
from tests.tasks.counting_target import Counting, CountingTarget

COUNTED = set[int]()


class Leaving(Counting):
    """What was counted once cannot be counted again: it lies in the module."""

    def step(self, action: Action) -> Observation:
        shown = super().step(action)
        self.right = self.right and self.n not in COUNTED
        COUNTED.add(self.n)
        return shown


class Chancy(Counting):
    """It asks for another number each time."""

    def reset(self, task: TargetTask) -> Observation:
        changed = TargetTask(task.id, task.split, task.family, task.seed, {"n": random.randrange(10**9)})
        return super().reset(changed)


class OfTheClass(Counting):
    """What it is about lies in the class: each reset starts anew, and the last one counts for all that are open."""

    def reset(self, task: TargetTask) -> Observation:
        shown = super().reset(task)
        OfTheClass.number = self.n
        return shown

    def step(self, action: Action) -> Observation:
        self.n = OfTheClass.number
        return super().step(action)


class Of(CountingTarget):
    def __init__(self, kind: type[Counting]) -> None:
        self.kind, self.made = kind, 0

    def tasks(self, split: str) -> Any:
        return [TargetTask(f"t{n}", split, "all", n, {"n": n}) for n in range(20)]

    def environment(self) -> Counting:
        self.made += 1
        return self.kind()


def told(target: Of, caplog: pytest.LogCaptureFixture) -> str:
    COUNTED.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trace"):
        check_repeats(target)
    return caplog.text


def test_what_an_episode_leaves_to_the_next_is_told(caplog: pytest.LogCaptureFixture) -> None:
    said = told(Of(Leaving), caplog)
    assert f"{LOOKED_AT} of {2 * LOOKED_AT} episodes of counting came to something else when they were pl" in said
    assert "task 't0', played by its reference solution, first success (last shown: 'counted'), then no succ" in said
    assert f"{2 * LOOKED_AT} of {2 * LOOKED_AT} episodes" in told(Of(Chancy), caplog)


def test_episodes_that_share_their_state_while_both_are_open_are_told(caplog: pytest.LogCaptureFixture) -> None:
    said = told(Of(OfTheClass), caplog)
    assert f"{LOOKED_AT} of {2 * LOOKED_AT} episodes of counting came to something else" in said
    assert "each with another one in its middle: task 't0', played by its reference solution, first success" in said
    one = Of(Counting)
    shared = Counting()
    one.environment = lambda: shared  # type: ignore[method-assign]
    assert "episodes of counting came to something else" in told(one, caplog)


def test_what_repeats_is_not_told_of_and_ours_is_not_played(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Of(Counting)
    assert told(sound, caplog) == ""
    assert sound.made == 6 * LOOKED_AT  # each again, with another in its middle
    monkeypatch.setattr(repeats, "is_builtin", lambda target: True)
    assert told(Of(Leaving), caplog) == ""


def test_one_that_cannot_be_made_is_left_to_the_check_of_its_kinds(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Counting:
        raise KeyError("x")

    assert told(Of(broken), caplog) == ""  # type: ignore[arg-type]
