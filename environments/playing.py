"""The loop of an episode that is played without tokens, by whatever acts: an oracle, a simple or a hostile policy, an
API model, a person."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from environments.contract import Action, Environment, Observation, TargetTask, Termination
from errors import EnvironmentFault


def for_one_episode(task: TargetTask) -> TargetTask:
    """The task with a payload of its own. Episodes share a task, at the same time and one after another; an environment
    that keeps its state in the payload would leave it to the others. Raises `EnvironmentFault` where it cannot be
    copied."""
    try:
        return replace(task, payload=copy.deepcopy(task.payload))
    except Exception as problem:  # what is no JSON may raise anything
        raise EnvironmentFault(
            f"the payload of task {task.id!r} cannot be copied ({type(problem).__name__}: {problem}); give JSON"
        ) from problem


def take_turns(
    environment: Environment,
    first: Observation,
    act: Callable[[int], Action | None],
    step: Callable[[Action], Observation],
    *,
    past_the_end: bool = False,
) -> Termination:
    """Let `act` and the environment answer one another after `first`, the observation that `reset` gave.

    `act` is given how many actions were taken so far; it returns the next one, or None to stop. `step` carries an
    action into the environment. It is where a caller keeps the conversation, sets a deadline or shows what happens; one
    that does nothing of this gives `environment.step`. `past_the_end` goes on after `done`, as a hostile client may.

    Returns `MAX_STEPS` when the environment's limit ended the episode, else `DONE`. Nothing is scored or closed, and
    what `act` or `step` raises reaches the caller.
    """
    taken, done = 0, first.done
    while past_the_end or not done:
        if taken >= environment.max_steps:
            return Termination.MAX_STEPS
        action = act(taken)
        if action is None:
            break
        taken += 1
        done = step(action).done
    return Termination.DONE
