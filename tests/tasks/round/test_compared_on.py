"""What methods are compared on: tasks of a seed's own where the target draws them, else the fixed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from environments.contract import Draw
from errors import TargetError
from settings import load_settings
from tasks.round.stage import forget, open_context
from tests.tasks.methods.letters_target import SHIFTED, SIZE, made


def compared(home: Path, target: str, seed: int, tasks: int = 0) -> tuple[list[str], list[str]]:
    settings = load_settings(profile="smoke", home=home, target=target, seed=seed, rollout={"tasks": tasks})
    context = open_context(settings)
    try:
        test, shift = context.drawing.compared_on
        fixed = {t.id for t in context.target.tasks("test")}
        assert fixed.isdisjoint(t.id for t in test) is (target == "shop")
        return [t.id for t in test], [t.id for t in shift]
    finally:
        forget(context.round.id)


def test_a_seed_of_a_target_that_draws_has_tasks_of_its_own(settings_folder: Path) -> None:
    one, other = (compared(settings_folder / str(seed), "shop", seed) for seed in (54, 55))
    assert (len(one[0]), len(one[1])) == (160, 192)
    for mine, theirs in zip(one, other, strict=True):
        assert set(mine).isdisjoint(theirs)
    again = compared(settings_folder / "again", "shop", 54, tasks=40)
    assert set(again[0]) < set(one[0]), "of them those at equal distances"
    assert len(again[0]) == 40
    assert again[1] == one[1]


@pytest.mark.parametrize("seed", [54, 55])
def test_a_finite_target_has_the_same_for_every_seed(settings_folder: Path, seed: int) -> None:
    test, shift = compared(settings_folder / str(seed), "tests.tasks.methods.letters_target:target", seed)
    assert (len(test), len(shift)) == (SIZE, SHIFTED)
    assert test[0] == "test-low-300"


@pytest.mark.parametrize("drawn", ["diagnosis", "validation"])
def test_a_draw_with_ids_of_other_tasks_is_refused(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, drawn: str
) -> None:
    context = open_context(load_settings(profile="smoke", home=settings_folder, target="shop"))
    target: Any = context.target
    first = target.tasks("test")[0] if drawn == "diagnosis" else target.drawn("diagnosis", Draw(0, 1))[0]
    monkeypatch.setattr(type(context.target), "drawn", lambda self, split, draw: [replace(first, split=split)])
    try:
        with pytest.raises(TargetError, match=f"{first.id!r} is in {first.split} and in the draw of {drawn}"):
            context.tasks(drawn)
    finally:
        forget(context.round.id)


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (lambda t: t.tasks("test"), "'test-low-300' is in test and in the shift test"),
        (lambda t: [replace(x, split="test") for x in t.tasks("validation")], "is in validation and in the shift test"),
        (lambda t: t.tasks("validation"), "'validation-low-200' of the shift test says that its split is 'validation'"),
        # A budget would pay for it, as for what a method plays for itself.
        (
            lambda t: [replace(made("test", 400), split="shift")],
            "its split is 'shift'; give each task the split 'test'",
        ),
        (lambda t: 1 / 0, r"shift_test\(\) of target .* fails: ZeroDivisionError"),
        (lambda t: iter(()), "the tasks of the shift test are a "),
    ],
)
def test_a_shift_test_that_would_not_be_measured_apart_is_refused(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, shift: Callable[[Any], Any], said: str
) -> None:
    name = "tests.tasks.methods.letters_target:target"
    context = open_context(load_settings(profile="smoke", home=settings_folder, target=name))
    monkeypatch.setattr(type(context.target), "shift_test", shift)
    try:
        with pytest.raises(TargetError, match=said):
            _ = context.drawing.compared_on
    finally:
        forget(context.round.id)
