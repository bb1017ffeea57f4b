"""What a target draws is looked at before a round plays anything, validation among it."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db import Store, open_store
from environments.contract import Draw, TargetTask
from environments.targets.catalogue import load_target
from errors import TargetError
from tasks.round.drawing import RoundTasks
from tasks.targets.draws import check_draws, drawn_for
from tasks.targets.parts import tell_of_parts
from tests.tasks.targets.drawing_target import DrawingTarget, numbered


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite+pysqlite:///{tmp_path / 'trace.db'}") as opened:
        yield opened


class Failing(DrawingTarget):
    """Its validation cannot be read."""

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        if split == "validation":
            raise ValueError("no such file")
        return super().drawn(split, draw)


class Empty(DrawingTarget):
    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        return [] if split == "validation" else super().drawn(split, draw)


class OfDiagnosis(DrawingTarget):
    """What is proven is what was learnt."""

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        return [replace(t, id=f"{split}{t.id}", split=split) for t in super().drawn("diagnosis", draw)]


class OfTest(DrawingTarget):
    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        return [replace(t, id=f"{split}-{t.id}", split=split) for t in self.tasks("test")]


class Alike(DrawingTarget):
    """Every round has the same tasks."""

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        return super().drawn(split, replace(draw, number=1))


class Chancy(DrawingTarget):
    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        return numbered(split, split, random.randrange(10**6, 10**9), 3)


class DrawnTwice(DrawingTarget):
    """Further tasks are those that the round has."""

    def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        mine = [task for task in self.drawn("validation", draw) if task.family == family]
        return [replace(task, id=f"further-{task.id}") for task in mine[:count]]


class Renumbered(DrawingTarget):
    """Every round counts its tasks from 0."""

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        return [replace(task, id=f"{split}-{n}") for n, task in enumerate(super().drawn(split, draw))]


class FurtherRenumbered(DrawingTarget):
    def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        found = super().further(draw, family, count)
        return [replace(task, id=f"further-{family}-{n}") for n, task in enumerate(found)]


class Untold(DrawingTarget):
    def content(self, task: TargetTask) -> Any:
        return task.payload["n"]


class Generating(DrawingTarget):
    """Its scenarios to train on have numbers of their own; for one number in two it has none."""

    first = 10**9

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {"a": ("count",), "b": ("count",)}

    def generate(self, family: str, seed: int) -> TargetTask:
        if seed % 2:
            raise KeyError(seed)
        return TargetTask(f"scenario-{seed}", "generated", family, seed, {"n": self.first + seed % 40})


class Leaking(Generating):
    """They are among those that a round draws for validation."""

    first = 1100


class CalledShop(Alike):
    """Made from the shop, and called like it."""

    name = "shop"


REFUSED: dict[type[DrawingTarget], str] = {
    Failing: r"drawn\('validation', ...\) of target 'counting' fails: ValueError: no such file; mend",
    Empty: "target 'counting' draws no task for validation; draw some",
    OfDiagnosis: "drawn for validation, has the content of one that is drawn for diagnosis, too; draw none",
    OfTest: "'diagnosis-test--120', drawn for diagnosis, has the content of one in test; draw none that",
    Alike: "'diagnosis-drawn-1000', drawn for diagnosis, has the content of one that an earlier round has",
    Chancy: r"drawn\('diagnosis', ...\) of target 'counting' gives other tasks when it is asked again",
    DrawnTwice: "'further-validation-drawn-1100', drawn for validation, has the content of one that the round",
    Renumbered: "task 'diagnosis-0', drawn for a second round, has the id of another task that the first one drew",
    FurtherRenumbered: "task 'further-a-0', drawn for a second round, has the id of another task that the first one",
    CalledShop: "'diagnosis-drawn-1000', drawn for diagnosis, has the content of one that an earlier round has",
    Leaking: r"generate\('[ab]', \d+\) of target 'counting' has the content of task 'validation-drawn-11",
    Untold: r"content\(\) of target 'counting' gave -40; give a text",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_draws_that_prove_nothing_are_refused(kind: type[DrawingTarget]) -> None:
    with pytest.raises(TargetError, match=REFUSED[kind]):
        check_draws(kind(), 0)


def test_draws_as_they_have_to_be_pass(caplog: pytest.LogCaptureFixture) -> None:
    check_draws(DrawingTarget(), 0)
    assert not caplog.records


def test_a_target_that_says_that_little_is_left_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Once(DrawingTarget):
        def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
            if draw.used:
                raise TargetError("all numbers are used")
            return super().drawn(split, draw)

    with caplog.at_level(logging.WARNING, logger="trace"):
        check_draws(Once(), 0)
    assert "draws too little for further tasks, or for a second round: all numbers are used" in caplog.text


def test_what_draws_of_ours_pass_is_the_same_rule() -> None:
    shop: Any = load_target("shop")
    first = drawn_for(shop, Draw(3, 1))
    used = frozenset(shop.content(task) for tasks in first.values() for task in tasks)
    assert {split: len(tasks) for split, tasks in drawn_for(shop, Draw(3, 2, used)).items()} == {
        "diagnosis": 160,
        "validation": 160,
    }
    with pytest.raises(TargetError, match="that an earlier round has drawn"):
        drawn_for(Alike(), Draw(0, 2, frozenset(str(n) for n in range(1000, 1120))))


def test_a_round_draws_validation_before_it_plays_diagnosis(store: Store) -> None:
    """Else it would be found after all trainings that there is none."""
    at = store.start_round("counting", "counting-1", 0, "smoke", {})
    with pytest.raises(TargetError, match="no such file"):
        RoundTasks(store, at, Failing(), 0, None).played("diagnosis")
    tasks = RoundTasks(store, at, DrawingTarget(), 0, None)
    assert [task.id for task in tasks.played("diagnosis")][:1] == ["diagnosis-drawn-1000"]
    assert [task.id for task in tasks.played("validation")][:1] == ["validation-drawn-1100"]


def test_further_tasks_that_cannot_be_drawn_do_not_end_a_round(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(DrawingTarget):
        def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
            raise KeyError(family)

    at = store.start_round("counting", "counting-1", 0, "smoke", {})
    assert RoundTasks(store, at, Broken(), 0, None).further({"a": 3}) == []
    assert "no 3 further validation tasks of a are drawn: further(...) of target 'counting' fails: Key" in caplog.text


def test_half_of_a_part_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Half:
        name, licence, data_hash = "half", "MIT", "1"
        drawn, content = DrawingTarget.drawn, DrawingTarget.content

        def generate(self, family: str, seed: int) -> TargetTask:
            raise AssertionError("not asked")

    half: Any = Half()
    with caplog.at_level(logging.WARNING, logger="trace"):
        tell_of_parts(half)
        tell_of_parts(DrawingTarget())
        tell_of_parts(load_target("shop"))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "target half has generate() and lacks families(), so that nothing is composed to train in",
        "target half has drawn() and lacks further(), so that no round draws tasks of its own",
    ]
