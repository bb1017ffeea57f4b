"""Splits that have the same tasks are told of, whatever their ids and payloads say."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from environments.contract import SPLITS, Observation, TargetTask
from settings import Settings
from tasks.targets import looks
from tasks.targets.alike import check_alike
from tests.tasks.counting_target import Counting, CountingTarget


class Drawn(Counting):
    """Its number is drawn from the task's seed."""

    def reset(self, task: TargetTask) -> Observation:
        number = random.Random(task.seed).randrange(10**9)
        return super().reset(replace(task, payload={"n": number}))


class Seeded(CountingTarget):
    """Thirty seeds a split, each split from where `first` says; the split's name may stand in the payload."""

    def __init__(self, first: Sequence[int], **payload: Any) -> None:
        self.first, self.payload = first, payload

    def tasks(self, split: str) -> Sequence[TargetTask]:
        first = self.first[SPLITS.index(split)]
        return [TargetTask(f"{split}-{n}", split, "all", first + n, {**self.payload, "of": split}) for n in range(30)]

    def environment(self) -> Counting:
        return Drawn()


def told(target: CountingTarget, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trace"):
        check_alike(target)
    return caplog.text


def test_splits_that_count_the_same_seeds_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        "20 of 20 tasks of validation that were looked at show and want what tasks of diagnosis do, such as "
        in told(Seeded((0, 0, 0)), caplog)
    )
    assert (
        "20 of 20 tasks of test that were looked at show and want what tasks of validation do, such as 'test-"
        in told(Seeded((100, 0, 0)), caplog)
    )


def test_splits_of_their_own_are_not(caplog: pytest.LogCaptureFixture) -> None:
    assert told(Seeded((0, 100, 200)), caplog) == ""


def test_it_is_looked_at_before_a_round(settings_folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trace"):
        looks.look_over(Settings(), Seeded((0, 0, 0)))
    assert "figures are of what was learnt by heart; make each split of seeds" in caplog.text


def test_a_target_that_says_which_tasks_are_the_same_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    class Saying(Seeded):
        def content(self, task: TargetTask) -> str:
            return task.id

    assert told(Saying((0, 0, 0)), caplog) == ""
