"""The target's own prompt, and its first task's opening, on which adapters are proven live."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import Message, Prompt, TargetTask
from environments.targets.shop.target import target as shop
from errors import EnvironmentFault
from tasks.round.target_prompt import NEUTRAL, first_opening, target_prompt
from tests.tasks.counting_target import Counting, target


class Taskless:
    """Stands for a target on which nothing was played yet: its environment must not be asked for."""

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return ()


def test_it_opens_as_the_first_diagnosis_task_does() -> None:
    prompt, first = first_opening(shop())
    environment = shop().environment()
    observation = environment.reset(shop().tasks("diagnosis")[0])
    assert first == observation.messages
    assert prompt == Prompt.of(environment)
    assert prompt.instructions
    assert prompt.examples
    assert first[-1].role == "user"


def test_without_diagnosis_tasks_the_next_split_gives_the_task() -> None:
    assert target.tasks("diagnosis") == target.tasks("validation") == []
    assert first_opening(target) == (Prompt("Count.", Counting.tools), (Message("user", "Count 0."),))


def test_without_any_task_a_neutral_sentence_is_asked() -> None:
    nothing: Any = Taskless()
    assert first_opening(nothing) == (Prompt(), (Message("user", NEUTRAL),))


def test_tools_that_differ_by_task_are_shown_together() -> None:
    class Changing(Counting):
        def reset(self, task: TargetTask) -> Any:
            self.tools = ({"type": "function", "function": {"name": task.id, "parameters": {}}}, *Counting.tools)
            return super().reset(task)

    class Several:
        def tasks(self, split: str) -> Sequence[TargetTask]:
            return [TargetTask(name, split, "f", 0, {"n": 0}) for name in ("one", "two")]

        def environment(self) -> Changing:
            return Changing()

    several: Any = Several()
    prompt = target_prompt(several)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["one", "count", "two"]
    assert prompt.instructions == "Count."


class Breaking(Counting):
    """Nothing is found for the tasks below the number `opens`."""

    opens = 2

    def reset(self, task: TargetTask) -> Any:
        if int(task.payload["n"]) < self.opens:
            raise KeyError("no such record")
        return super().reset(task)


def breaking(opens: int) -> Any:
    tasks = [TargetTask(f"t{n}", "diagnosis", "f", n, {"n": n}) for n in range(4)]
    environment = type("Broken", (Breaking,), {"opens": opens})
    return SimpleNamespace(tasks=lambda split: tasks, environment=environment)


def test_a_task_that_does_not_open_is_passed_over() -> None:
    assert target_prompt(breaking(2)) == Prompt("Count.", tuple(Counting.tools))
    assert first_opening(breaking(2))[1] == (Message("user", "Count 2."),)


def test_a_target_none_of_whose_tasks_opens_is_told_why() -> None:
    for ask in (target_prompt, first_opening):
        with pytest.raises(EnvironmentFault, match="reset raised KeyError"):
            ask(breaking(9))
