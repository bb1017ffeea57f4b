"""Advice is the solution of another scenario of the family, and is shown only where a task carries it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from environments.contract import Action, Message, Observation, Prompt, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.hints import Advised, advised, is_advised, solved, unadvised, with_advice
from environments.targets.shop.families import FAMILIES
from environments.targets.shop.target import target
from environments.wrapping import WrappedEnvironment
from errors import CallOverdue


def composed(*families: str) -> ComposedEnvironment:
    return ComposedEnvironment(target(), CompositionSpec("shop", target().data_hash, "x", families))


def test_advice_is_a_whole_solution_up_to_the_last_turn() -> None:
    made = composed("cancel_without_number")
    advice = made.advice(made.own_scenario(1))
    assert [m.role for m in advice] == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert advice[1].content == "What is your order number?"
    (call,) = advice[3].tool_calls
    assert call.name == "cancel"
    assert advice[4].content == "ok"


@pytest.mark.parametrize("family", FAMILIES)
def test_advice_is_of_the_same_family_and_another_scenario(family: str) -> None:
    made = composed("use_coupon", family) if family != "use_coupon" else composed(family)
    tasks = [t for t in map(made.own_scenario, range(40)) if t.family == family][:8]
    advice = [made.advice(task) for task in tasks]
    assert all(a == advice[0] for a in advice)  # the same for all: one prefix to compute
    openings = {task.payload["opening"] for task in tasks}
    assert advice[0][0].content not in openings or len(openings) < 4  # a family with few openings may repeat one
    called = {c.name for m in advice[0] for c in m.tool_calls}
    assert called == {step["call"] for step in tasks[0].payload["reference"] if "call" in step}


def test_without_a_reference_there_is_no_advice() -> None:
    class Silent:
        max_steps = 1

        def reset(self, task: TargetTask) -> Observation:
            return Observation((Message("user", "Hello."),))

        def oracle(self) -> Action | None:
            return None

        def close(self) -> None:
            pass

    assert solved(Silent(), TargetTask("t", "generated", "f", 0)) == ()  # type: ignore[arg-type]


def test_a_reference_that_fails_is_no_advice() -> None:
    class Wrong(WrappedEnvironment):
        def step(self, action: Action) -> Observation:
            return super().step(Action(content="I cannot help you.") if action.tool_calls else action)

    task = composed("use_coupon").own_scenario(1)
    assert solved(target().environment(), task)
    assert solved(Wrong(target().environment()), task) == ()


def test_a_reference_that_raises_is_no_advice_and_its_environment_is_closed() -> None:
    """A rare scenario of a user's target may raise: it ends no training."""

    class Broken(WrappedEnvironment):
        closed = False

        def __init__(self, problem: Exception) -> None:
            super().__init__(target().environment())
            self.problem = problem

        def step(self, action: Action) -> Observation:
            raise self.problem

        def close(self) -> None:
            self.closed = True

    task = composed("use_coupon").own_scenario(1)
    raising, overdue = Broken(KeyError("price")), Broken(CallOverdue("the step did not return"))
    assert solved(raising, task) == ()
    with pytest.raises(CallOverdue):  # on another day it may return: the same seed would give two scenarios
        solved(overdue, task)
    assert raising.closed
    assert overdue.closed


def test_an_environment_shows_the_advice_of_its_task_alone() -> None:
    made = composed("use_coupon")
    task = made.own_scenario(1)
    told = advised(task, made.advice(task))
    assert is_advised(told)
    assert unadvised(told) == task
    environment = Advised(made.environment())
    first = environment.reset(task)
    plain = Prompt.of(environment)
    assert environment.reset(told) == first
    assert Prompt.of(environment) == with_advice(plain, told) != plain
    assert tuple(Prompt.of(environment).examples[len(plain.examples) :]) == tuple(made.advice(task))
    while (action := environment.oracle()) is not None:
        environment.step(action)
    assert environment.score().success
    environment.reset(task)
    assert Prompt.of(environment) == plain


def test_a_payload_of_the_target_may_have_advice_of_its_own() -> None:
    """Its keys were taken for the project's: every episode of a training was lost."""
    made = composed("use_coupon")
    plain = made.own_scenario(1)
    payload = {**plain.payload, "advice": "x", "code_hash": "y"}
    task = replace(plain, payload=payload)
    told = advised(task, made.advice(plain))
    assert not is_advised(task)
    assert unadvised(told).payload == unadvised(task).payload == payload
    given: list[Any] = []

    class Reading(WrappedEnvironment):
        def reset(self, task: TargetTask) -> Observation:
            given.append(task.payload)
            return super().reset(task)

    environment = Advised(Reading(made.environment()))
    for shown in (task, told):
        environment.reset(shown)
        while (action := environment.oracle()) is not None:
            environment.step(action)
        assert environment.score().reward == 1
    assert given == [payload, payload]
