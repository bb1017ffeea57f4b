"""Hints: soft advice for scenarios on which a policy never succeeds by itself (method, section 4).

Some of a group's rollouts are shown how another scenario of the same family is solved, as one more worked example in
the prompt: what is done, never with what. Training takes it out of the prompt again before the gradient
(`models/training/rollouts.py`), so what is learnt is to do without. (Advice in words, the names of the tools in order,
did nothing for the embedded model: `benchmarks/findings/earlier.md`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from environments.contract import Action, Environment, Message, Observation, Prompt, TargetTask
from environments.playing import for_one_episode, take_turns
from environments.synthesized.drawing import AT_ONCE
from environments.wrapping import WrappedEnvironment

# Where a task carries its advice: a tuple of messages, which stays within the process and is stored nowhere. No target
# has a key of this name in its payloads, as it may have "advice".
ADVICE = "trace:advice"


def solved(environment: Environment, task: TargetTask) -> tuple[Message, ...]:
    """The reference solution of a scenario as a worked example, up to the agent's last turn; () without one that
    succeeds, which one that raises is, too. Raises what is of `drawing.AT_ONCE`: it says nothing of the scenario."""
    messages: list[Message] = []

    def step(action: Action) -> Observation:
        observation = environment.step(action)
        messages.extend((action.as_message(), *observation.messages))
        return observation

    try:
        first = environment.reset(for_one_episode(task))
        messages.extend(first.messages)
        take_turns(environment, first, lambda taken: environment.oracle(), step)
        while messages and messages[-1].role != "assistant":
            messages.pop()
        return tuple(messages) if messages and environment.score().success else ()
    except AT_ONCE:
        raise
    except Exception:  # a user's environment may raise anything
        return ()
    finally:
        environment.close()


def advised(task: TargetTask, advice: Sequence[Message]) -> TargetTask:
    """The task with advice, which `Advised` shows."""
    return replace(task, payload={**task.payload, ADVICE: tuple(advice)})


def is_advised(task: TargetTask) -> bool:
    """Whether a task carries advice."""
    return ADVICE in task.payload


def unadvised(task: TargetTask) -> TargetTask:
    """The task without advice; as it is where it carries none."""
    if not is_advised(task):
        return task
    return replace(task, payload={name: value for name, value in task.payload.items() if name != ADVICE})


def with_advice(prompt: Prompt, task: TargetTask) -> Prompt:
    """The prompt that an episode on an advised task stands behind."""
    return replace(prompt, examples=(*prompt.examples, *task.payload[ADVICE]))


class Advised(WrappedEnvironment):
    """An environment that shows the advice that its task carries, if any, behind its own examples."""

    def reset(self, task: TargetTask) -> Observation:
        observation = super().reset(unadvised(task))
        if is_advised(task):
            self.examples = with_advice(Prompt.of(self.inner), task).examples
        return observation
