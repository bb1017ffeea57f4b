"""Advice says which tools a scenario takes, never with what, and is shown only where a task carries it."""

from __future__ import annotations

import pytest

from environments.contract import Action, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.hints import Advised, advice_on, advised, is_advised, unadvised
from environments.targets.shop.families import FAMILIES
from environments.targets.shop.target import target


def composed(family: str) -> ComposedEnvironment:
    return ComposedEnvironment(target(), CompositionSpec("shop", target().data_hash, "x", (family,)))


@pytest.mark.parametrize(
    ("family", "advice"),
    [
        ("use_coupon", "Advice: call coupon(order, code)."),
        ("refund_all", "Advice: call find(order), then call refund(order, amount)."),
        ("cancel_without_number", "Advice: answer in words, then call cancel(order)."),
        ("cancel_two", "Advice: call cancel(order), then answer in words, then call cancel(order)."),
    ],
)
def test_advice_names_the_tools_in_order(family: str, advice: str) -> None:
    made = composed(family)
    assert made.advice(made.own_scenario(1)) == advice


@pytest.mark.parametrize("family", FAMILIES)
def test_advice_holds_no_value_of_the_reference(family: str) -> None:
    made = composed(family)
    for seed in range(5):
        task = made.own_scenario(seed)
        advice = made.advice(task)
        values = [str(v) for step in task.payload["reference"] for v in step.get("arguments", {}).values()]
        assert not any(value in advice for value in values)


def test_where_nothing_is_called_there_is_nothing_to_advise() -> None:
    class Silent:
        tools, max_steps = (), 1

        def reset(self, task: TargetTask):
            return target().environment().reset(target().tasks("diagnosis")[0])

        def oracle(self) -> Action | None:
            return None

    assert advice_on(Silent(), TargetTask("t", "generated", "f", 0)) == ""  # type: ignore[arg-type]


def test_an_environment_shows_the_advice_of_its_task_alone() -> None:
    made = composed("use_coupon")
    task = made.own_scenario(1)
    told = advised(task, "Advice: try.")
    assert is_advised(told)
    assert unadvised(told) == task
    environment = Advised(made.environment())
    (plain,), (shown,) = environment.reset(task).messages, environment.reset(told).messages
    assert shown.content == f"{plain.content}\nAdvice: try."
    assert (plain.role, shown.role) == ("user", "user")
    while (action := environment.oracle()) is not None:
        environment.step(action)
    assert environment.score().success
