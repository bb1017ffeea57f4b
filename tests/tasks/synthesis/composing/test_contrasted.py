"""A composed environment whose capability has one right answer gets as many scenarios in which that is wrong."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from db import GENERALIST
from environments.contract import TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.shop.target import ShopTarget, target
from environments.validation.checks import Limits, validate_environment
from tasks.synthesis.environments import compose, contrasted
from tasks.synthesis.guarded import GuardedTarget

LIMITS = Limits(distinct=60, searched=120, episodes=60, attack_seeds=3, replayed=4)
SOLVED = {"cancel_pending": 0.4, "item_price": 0.3, "wants_person": 0.1}


def composed(capability: str, success: dict[str, float], share: float = 1 / 3) -> ComposedEnvironment:
    at = SimpleNamespace(target="shop", data_hash=target().data_hash, seed=0)
    return compose(target(), at, capability, success, share)  # type: ignore[arg-type]


def test_handing_over_is_learnt_beside_what_is_not_handed_over() -> None:
    before = composed("hand_over_customer", SOLVED)
    environment, contrast, alone = contrasted(before)
    assert contrast is not None
    assert not alone
    assert environment.spec.retention_share == 0.5
    assert environment.spec.families == ("wants_person",)
    assert environment.spec.id != before.spec.id
    drawn = [environment.scenario(seed) for seed in range(200)]
    assert {contrast.wrong(task) for task in drawn if task.family == "wants_person"} == {False}
    assert 70 < sum(map(contrast.wrong, drawn)) < 130
    verdict = validate_environment(environment.environment, environment.scenario, LIMITS, contrast=contrast)
    assert verdict.accepted, verdict.reasons


def test_a_larger_share_is_kept() -> None:
    environment, _, _ = contrasted(composed("hand_over_customer", SOLVED, share=0.6))
    assert environment.spec.retention_share == 0.6


def test_what_has_many_answers_is_left_as_it_is() -> None:
    before = composed("cancel_order", SOLVED)
    assert contrasted(before) == (before, None, "")


@pytest.mark.parametrize(("success", "share"), [({}, 1 / 3), (SOLVED, 0.0)])
def test_without_anything_beside_it_the_reason_is_told(success: dict[str, float], share: float) -> None:
    before = composed("hand_over_customer", success, share)
    environment, contrast, alone = contrasted(before)
    assert environment is before
    assert contrast is None
    assert "one answer solves every scenario of 'hand_over_customer'" in alone
    assert "retention_share" in alone


def test_constants_are_held_to_what_no_one_answer_solves_in_the_generalists_environment() -> None:
    """Whichever scenario is the first: the solution of a `wants_person` is right in all of that family."""
    given = CompositionSpec("shop", target().data_hash, GENERALIST, ("item_price", "refund_part", "wants_person"))
    before = ComposedEnvironment(target(), given)
    environment, contrast, alone = contrasted(before)
    assert (environment, alone) == (before, "")
    assert contrast is not None
    assert {task.family for task in map(environment.scenario, range(60)) if not contrast.wrong(task)} == {
        "wants_person"
    }
    first = next(seed for seed in range(60) if environment.scenario(seed).family == "wants_person")

    def scenario(seed: int) -> TargetTask:
        return environment.scenario(first + seed)

    assert validate_environment(environment.environment, scenario, LIMITS, contrast=contrast).accepted
    refused = validate_environment(environment.environment, scenario, LIMITS)
    assert any("constant_replay" in reason for reason in refused.reasons), "a third of all is that family"
    none_alike = ComposedEnvironment(target(), replace(given, families=("item_price", "refund_part")))
    assert contrasted(none_alike) == (none_alike, None, "")


def test_a_family_that_one_answer_solves_is_nobodys_retention() -> None:
    """Handing over solves every `wants_person`: a red team that tries every tool would be paid for it."""
    environment = composed("cancel_order", SOLVED)
    assert environment.spec.retention_families == ("item_price",)
    verdict = validate_environment(environment.environment, environment.scenario, LIMITS)
    assert verdict.accepted, verdict.reasons
    alone = composed("cancel_order", {"wants_person": 0.1})
    assert (alone.spec.retention_families, alone.spec.retention_share) == ((), 0.0)


def test_a_seed_for_which_a_generator_raises_is_passed_over() -> None:
    """It stands for a slip in a user's generator, which no other scenario shows."""
    asked: list[tuple[str, int]] = []

    class Slipping(ShopTarget):
        def generate(self, family: str, seed: int) -> TargetTask:
            if (family, seed) == ("item_price", 7):
                raise ValueError("empty range for randrange()")
            asked.append((family, seed))
            return super().generate(family, seed)

    at: Any = SimpleNamespace(target="shop", data_hash=target().data_hash, seed=0)
    environment = compose(GuardedTarget(Slipping()), at, "cancel_order", SOLVED, 1 / 3)
    assert environment.spec == composed("cancel_order", SOLVED).spec
    assert sorted(seed for family, seed in asked if family == "item_price") == [*range(7), *range(8, 21), 7 + 21]
