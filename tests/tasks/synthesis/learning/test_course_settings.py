"""What of a training's settings follows from its course and its budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from settings import load_settings
from tasks.synthesis.learning.course import Course
from tasks.synthesis.learning.training import settings_of_course


@pytest.mark.parametrize(
    ("patience", "given", "paid", "expected"),
    [
        (0, {}, None, (0, None)),
        (0, {}, 70, (0, 70)),
        # Five steps of at most two batches of twelve: what the round has planned pays for patience, too.
        (6, {}, None, (6, 120)),
        (6, {}, 500, (6, 120)),
        (6, {}, 70, (6, 70)),
        # What all steps may play together is no more than a first one may: it says itself that nothing is to be learnt.
        (6, {"steps": 2}, None, (2, 48)),
        (6, {"steps": 1}, None, (0, 24)),
        # A baseline has the whole of its account.
        (6, {"patience": 30}, 500, (30, 500)),
        (6, {"patience": 0}, None, (0, None)),
    ],
)
def test_a_patient_training_plays_no_more_than_its_round_has_planned(
    settings_folder: Path, patience: int, given: dict[str, int], paid: int | None, expected: tuple[int, int | None]
) -> None:
    train = {"steps": 5, "groups": 3, "group_size": 4, "collections": 2, "patience": patience}
    budget = None if paid is None else SimpleNamespace(for_training=lambda adapter: paid)
    round_ = SimpleNamespace(number=1)
    context: Any = SimpleNamespace(settings=load_settings(train=train), budget=budget, round=round_)
    environment: Any = None
    course = Course("refunds", environment, "adapter", Path("refunds"), **given)  # type: ignore[arg-type]
    made = settings_of_course(context, course, None)
    assert (made.patience, made.most_episodes) == expected
