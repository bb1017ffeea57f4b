"""Tasks that the store could not tell apart are refused before anything is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from environments.contract import SPLITS, TargetTask
from environments.targets import catalogue
from environments.targets.shop import target as shop
from environments.task_ids import checked_tasks, generated, refuse_repeats
from errors import AdapterError, TargetError
from tasks.measuring.policy_names import PolicyOptions
from tasks.measuring.targets import EvaluateRequest, evaluate_targets


class Given:
    """A user's target with the tasks given; it is never played."""

    name, licence = "given", "MIT"

    def __init__(self, tasks: Callable[[str], Any], data_hash: Any = "1") -> None:
        self._tasks, self.data_hash = tasks, data_hash

    def tasks(self, split: str) -> Sequence[TargetTask]:
        given: Sequence[TargetTask] = self._tasks(split)
        return given

    def environment(self) -> Any:
        raise AssertionError("a target with such tasks is not played")


def task(name: Any, split: str) -> TargetTask:
    return TargetTask(name, split, "f", 0, {"said": split})


REFUSED: dict[str, tuple[Callable[[str], Any], str]] = {
    "over splits": (lambda s: [task("0", s)], r"task id '0' is in diagnosis and in validation; give every task"),
    "within": (lambda s: [task(f"{s}-1", s), task(f"{s}-1", s)], "'diagnosis-1' is twice in diagnosis"),
    "another split": (lambda s: [task(s, "test")], "'diagnosis' of diagnosis says that its split is 'test'"),
    "a number": (lambda s: [task(3, s)], "diagnosis holds a task with the id 3; give a text"),
    "no id": (lambda s: [task("", s)], "the id ''; give a text"),
    "half a character": (lambda s: [task("\ud800", s)], "of diagnosis is not named in Unicode .*; clean it"),
    "no task": (lambda s: [{"id": s}], r"diagnosis holds \{'id': 'diagnosis'\}; give environments.contract.TargetTask"),
    "a generator": (lambda s: (task(s, s) for _ in range(1)), "the tasks of diagnosis are a generator; give a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tasks_that_cannot_be_told_apart_are_refused(name: str) -> None:
    tasks, said = REFUSED[name]
    with pytest.raises(TargetError, match=said):
        checked_tasks(Given(tasks))


@pytest.mark.parametrize("data_hash", [None, "", 3])
def test_a_data_hash_is_a_text(data_hash: Any) -> None:
    with pytest.raises(TargetError, match=f"data_hash of target 'given' is {data_hash!r}; give a text"):
        checked_tasks(Given(lambda split: [task(split, split)], data_hash))


def test_a_target_whose_own_code_fails_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(split: str) -> Any:
        if split == "validation":
            raise ValueError("no data file")
        return [task(split, split)]

    with pytest.raises(TargetError, match=r"tasks\('validation'\) of target 'given' fails: ValueError: no data file; "):
        checked_tasks(Given(fails))

    def refuses(split: str) -> Any:
        raise AdapterError("a package is missing")

    with pytest.raises(AdapterError, match=r"^a package is missing$"):
        checked_tasks(Given(refuses))
    monkeypatch.setattr(Given, "data_hash", property(lambda self: 1 / 0, lambda self, value: None), raising=False)
    with pytest.raises(TargetError, match="data_hash of target 'given' fails: ZeroDivisionError"):
        checked_tasks(Given(lambda split: []))


def test_an_evaluation_is_refused_before_it_plays(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(lambda split: [task("0", split)])
    monkeypatch.setattr("tasks.measuring.targets.load_target", lambda name, user, model: given)
    with pytest.raises(TargetError, match="'0' is in diagnosis and in validation"):
        evaluate_targets(EvaluateRequest("given:target", "test", "noop", home=settings_folder), PolicyOptions())


@pytest.mark.parametrize(
    "name", ["shop", "shop:shift", "bfcl:base", "bfcl:single", "bfcl:single:live", "reasoning-gym"]
)
def test_targets_of_the_catalogue_pass(name: str) -> None:
    try:
        target = catalogue.load_target(name)
    except TargetError as absent:
        pytest.skip(str(absent))
    assert set(checked_tasks(target)) == set(SPLITS)


def test_fresh_scenarios_of_the_shop_have_ids_of_their_own() -> None:
    fixed = checked_tasks(shop())
    refuse_repeats({**fixed, "generate": [shop().generate(family, 0) for family in shop().families()]})


@pytest.mark.parametrize(
    ("families", "said"),
    [
        (["refund"], r"families\(\) of target 'given' gave a list; give a dict of each family's capabilities"),
        ({"refund": "refund_order"}, "gave 'refund' the capabilities 'refund_order'; give a tuple of texts"),
        ({"refund": None}, "gave 'refund' the capabilities None; give a tuple of texts"),
    ],
)
def test_families_say_what_they_need(families: Any, said: str) -> None:
    class Generating(Given):
        def families(self) -> Any:
            return families

        def generate(self, family: str, seed: int) -> TargetTask:
            raise AssertionError("not asked")

    with pytest.raises(TargetError, match=said):
        checked_tasks(Generating(lambda split: [task(split, split)]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"family": None}, "the family None; give a text"),
        ({"seed": "1"}, "the seed '1'; give a"),
        ({"payload": None}, "the payload None; give a dict"),
        ({"capabilities": "refund"}, "the capabilities 'refund'; give a tuple of texts"),
    ],
)
def test_the_fields_of_a_task_are_as_the_contract_has_them(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TargetError, match=f"task 'test' of test has {said}"):
        checked_tasks(Given(lambda s: [replace(task(s, s), **change) if s == "test" else task(s, s)]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"id": "x"}, r"generate\('f'\) gave \{'id': 'x'\}; give"),
        (task("x", "g"), "gave a task of the family 'f'"),
        (task(7, "g"), r"generate\('other'\) holds a task with the id 7; give a text"),
        (
            replace(task("x", "g"), payload=["a"]),
            r"task 'x' of generate\('other'\) has the payload \['a'\]; give a dict",
        ),
    ],
)
def test_a_generator_gives_a_task_of_the_family_that_was_asked_for(given: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        generated(given, "other" if isinstance(given, TargetTask) else "f")
    assert generated(task("x", "g"), "f") == task("x", "g")


@pytest.mark.parametrize("named", ["test-1", "test-{}"])
def test_a_split_is_the_same_when_it_is_asked_for_again(named: str) -> None:
    drawn = count(1)

    def changing(split: str) -> list[TargetTask]:
        number = next(drawn) if split == "test" else 0
        return [TargetTask(named.format(number) if number else split, split, "f", 0, {"n": number})]

    with pytest.raises(TargetError, match="target 'given' gives another task for 'test-1', or none, when it is asked"):
        checked_tasks(Given(changing))


def test_a_sample_and_another_order_are_not_the_same_split() -> None:
    pool, at = [f"{n:03}" for n in range(100)], count(0)

    def window(split: str) -> list[TargetTask]:
        first = next(at)
        return [task(f"{split}-{n}", split) for n in pool[first : first + 40]]

    with pytest.raises(TargetError, match="gives another task for 'diagnosis-000', or none, when it is asked again"):
        checked_tasks(Given(window))

    def turned(split: str) -> list[TargetTask]:
        return [task(f"{split}-{n}", split) for n in (pool[::-1] if next(at) % 2 else pool)]

    with pytest.raises(TargetError, match=r"tasks\('diagnosis'\) of target 'given' gives the tasks in another order"):
        checked_tasks(Given(turned))
    left = iter([1, 1, 1, 0])
    with pytest.raises(TargetError, match="another task for 'diagnosis', or none"):
        checked_tasks(Given(lambda split: [task(split, split)] * next(left)))


def test_a_split_may_grow() -> None:
    drawn = count(1)
    assert checked_tasks(Given(lambda split: [task(f"{split}-{n}", split) for n in range(next(drawn))]))
