"""Scenarios that a generator may not give: tasks that decide and report, and different ones under one id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from environments.contract import SPLITS, Message, Observation, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.catalogue import load_target
from environments.validation.apart import not_apart, repeated
from environments.validation.checks import Limits
from errors import TargetError
from tasks.synthesis.environments import validated
from tasks.synthesis.guarded import GuardedTarget
from tests.environments.word_environment import Word

LIMITS = Limits(distinct=20, searched=40, episodes=20, attack_seeds=1, replayed=4)


class Numbers:
    """Its splits have the numbers below 300; `number` says which a seed gives, and `name` its id."""

    name, licence, data_hash = "numbers", "MIT", "1"

    def __init__(self, number: Callable[[int], int], name: Callable[[int], str] = "fresh-{}".format) -> None:
        self.number, self.named = number, name

    def tasks(self, split: str) -> Sequence[TargetTask]:
        first = {"diagnosis": 0, "validation": 100, "test": 200}[split]
        return [TargetTask(f"{split}-{n}", split, "say", n, {"n": n}) for n in range(first, first + 100)]

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {"say": ("say_number",)}

    def generate(self, family: str, seed: int) -> TargetTask:
        return TargetTask(self.named(seed), "generated", family, seed, {"n": self.number(seed)})

    def environment(self) -> Word:
        return Word()


def reasons(target: Any) -> list[str]:
    composed = ComposedEnvironment(GuardedTarget(target), CompositionSpec("numbers", "1", "say_number", ("say",)))
    _, verdict = validated(composed, LIMITS)
    assert verdict.accepted is not bool(verdict.reasons)
    return list(verdict.reasons)


def test_a_generator_that_gives_its_own_scenarios_is_sound() -> None:
    assert reasons(Numbers(lambda seed: 1000 + seed)) == []


def test_a_generator_that_gives_tasks_of_the_test_split_is_refused() -> None:
    (reason,) = reasons(Numbers(lambda seed: 200 + seed % 400))
    assert "are tasks of validation or test, e.g. 'fresh-" in reason
    assert "let generate() give none that a split has" in reason


def test_a_generator_whose_payloads_hold_a_seed_may_give_no_task_of_the_test_split_either() -> None:
    class Seeded(Numbers):
        """An agent is never shown the seed."""

        def generate(self, family: str, seed: int) -> TargetTask:
            task = super().generate(family, seed)
            return replace(task, payload=task.payload | {"seed": seed})

    assert reasons(Seeded(lambda seed: 1000 + seed)) == []
    (reason,) = reasons(Seeded(lambda seed: 200 + seed % 400))
    assert "are tasks of validation or test, e.g. 'fresh-" in reason


def test_nothing_is_played_where_a_model_would_be_paid_for_it() -> None:
    class Paid(Numbers):
        user = "litellm:some/model"

        def environment(self) -> Word:
            raise AssertionError("the user's model is asked")

    assert not_apart(Paid(abs), [TargetTask("fresh", "generated", "say", 1, {"n": 290, "seed": 1})]) == []


def test_what_is_asked_alike_and_comes_to_something_else_is_another_task() -> None:
    class Blind(Word):
        """The word has to be looked up."""

        def reset(self, task: TargetTask) -> Observation:
            super().reset(task)
            return Observation((Message("user", "Look up the word, and say it."),))

    class Blindly(Numbers):
        def environment(self) -> Word:
            return Blind()

    assert not_apart(Blindly(abs), [TargetTask("fresh", "generated", "say", 1, {"n": 900})]) == []
    assert not_apart(Blindly(abs), [TargetTask("fresh", "generated", "say", 1, {"n": 290, "seed": 1})]) != []


def test_different_scenarios_under_one_id_are_refused() -> None:
    (reason,) = reasons(Numbers(lambda seed: 1000 + seed, lambda seed: "fresh"))
    assert "give different scenarios with the id 'fresh'; give each its own" in reason


def test_an_id_of_a_split_is_refused_whatever_the_payload_holds() -> None:
    (reason,) = reasons(Numbers(lambda seed: 1000 + seed, lambda seed: f"test-{200 + seed}"[:8]))
    assert "e.g. 'test-2" in reason


@pytest.mark.parametrize("change", [{"seed": 5}, {"split": "generated"}])
def test_tasks_that_only_their_seed_tells_apart_are_not_compared_by_payload(change: dict[str, Any]) -> None:
    class Bare(Numbers):
        def tasks(self, split: str) -> Sequence[TargetTask]:
            return [replace(task, payload={}) for task in super().tasks(split)]

    bare = Bare(lambda seed: 0)
    fresh = replace(TargetTask("fresh-1", "generated", "say", 1), **change)
    assert not_apart(bare, [fresh]) == []
    assert not_apart(bare, [replace(fresh, id="test-200")]) != []


@pytest.mark.parametrize("name", ["shop", "bfcl:single"])
def test_built_in_generators_are_apart(name: str) -> None:
    target: Any = load_target(name)
    scenarios = [target.generate(family, seed) for family in target.families() for seed in range(10)]
    assert not_apart(target, scenarios) == []


def test_tasks_that_are_in_two_splits_are_told_by_what_they_hold() -> None:
    class Leaking(Numbers):
        step = 50

        def tasks(self, split: str) -> Sequence[TargetTask]:
            first = SPLITS.index(split) * self.step
            return [TargetTask(f"{split}-{n}", split, "say", n, {"n": n}) for n in range(first, first + 50)]

    target = Leaking(lambda seed: 1000 + seed)
    assert repeated(target) == ""
    target.step = 30
    assert repeated(target) == "20 of 50 tasks of test are tasks of validation, too, such as 'test-60'"
    target.step = 20
    assert repeated(target) == "10 of 50 tasks of test are tasks of diagnosis, too, such as 'test-40'"


@pytest.mark.parametrize("keys", [("a", 1), (("a",), "b")])
def test_payloads_with_keys_of_several_kinds_are_told_apart(keys: tuple[Any, Any]) -> None:
    class Keyed(Numbers):
        def tasks(self, split: str) -> Sequence[TargetTask]:
            return [TargetTask(f"{split}-{n}", split, "say", n, {keys[0]: n, keys[1]: split[:1]}) for n in range(2)]

    assert repeated(Keyed(abs)) == ""
    assert not not_apart(Keyed(abs), [TargetTask("fresh", "generated", "say", 9, {keys[0]: 9, keys[1]: "v"})])


def test_payloads_that_tell_no_tasks_apart_repeat_nothing() -> None:
    class Seeds(Numbers):
        def tasks(self, split: str) -> Sequence[TargetTask]:
            return [TargetTask(f"{split}-{n}", split, "say", n) for n in range(9)]

    assert repeated(Seeds(abs)) == ""


def test_a_content_that_fails_is_the_targets_error() -> None:
    class Untold(Numbers):
        def content(self, task: TargetTask) -> str:
            return str(task.payload["question"])

    with pytest.raises(TargetError, match=r"content\(\) of target 'numbers' fails: KeyError: 'question'; mend"):
        repeated(Untold(lambda seed: seed))
