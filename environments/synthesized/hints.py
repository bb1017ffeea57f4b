"""Hints: soft advice for scenarios on which a policy never succeeds by itself (method, section 4).

Some of a group's rollouts are shown which tools a scenario takes, in order, with the names of their parameters and
never a value. The advice stands at the end of the customer's first message, and training takes it out of the prompt
again before the gradient (`models/training/rollouts.py`): what is learnt is to do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from environments.contract import Action, Environment, Message, Observation, TargetTask
from environments.playing import take_turns
from environments.wrapping import WrappedEnvironment

# Where a task carries its advice.
ADVICE = "advice"
IN_WORDS = "answer in words"


def advice_on(environment: Environment, task: TargetTask) -> str:
    """What the reference solution does, without what it does it with; "" where it makes no call. `environment` is a
    spare one that the reference is played in."""
    steps: list[str] = []

    def step(action: Action) -> Observation:
        steps.extend(_signature(environment.tools, call.name) for call in action.tool_calls)
        if not action.tool_calls:
            steps.append(IN_WORDS)
        return environment.step(action)

    take_turns(environment, environment.reset(task), lambda taken: environment.oracle(), step)
    while steps and steps[-1] == IN_WORDS:  # how an answer ends needs no advice
        steps.pop()
    if not any(step != IN_WORDS for step in steps):
        return ""
    told = [step for i, step in enumerate(steps) if not i or step != steps[i - 1]]
    return f"Advice: {', then '.join(step if step == IN_WORDS else f'call {step}' for step in told)}."


def _signature(tools: Sequence[Mapping[str, Any]], name: str) -> str:
    parameters = {t["function"]["name"]: t["function"].get("parameters", {}).get("properties", ()) for t in tools}
    return f"{name}({', '.join(parameters.get(name, ()))})"


def advised(task: TargetTask, advice: str) -> TargetTask:
    """The task with advice, which `Advised` shows."""
    return replace(task, payload={**task.payload, ADVICE: advice})


def is_advised(task: TargetTask) -> bool:
    """Whether a task carries advice."""
    return ADVICE in task.payload


def unadvised(task: TargetTask) -> TargetTask:
    """The task without advice."""
    return replace(task, payload={name: value for name, value in task.payload.items() if name != ADVICE})


def with_advice(first: Sequence[Message], advice: str) -> tuple[Message, ...]:
    """An episode's first messages with advice at the end of the last one."""
    *before, last = first
    return (*before, replace(last, content=f"{last.content}\n{advice}"))


class Advised(WrappedEnvironment):
    """An environment that shows the advice that its task carries, if any."""

    def reset(self, task: TargetTask) -> Observation:
        observation = super().reset(unadvised(task))
        if not is_advised(task):
            return observation
        return Observation(with_advice(observation.messages, task.payload[ADVICE]), observation.done)
