"""Validate a target without a model: play its reference solution and an agent that does nothing.

    PYTHONPATH=. python benchmarks/targets.py tau2:retail

A target whose reference solution does not reach reward 1 cannot tell a good agent from a bad one; one where the no-op
agent succeeds gives points away, so its row stands beside every result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from environments.contract import SPLITS, Action, Environment, Score, Target, TargetTask
from environments.playing import take_turns
from environments.targets.third_party.adapter import NO_OP_REPLY

Player = Callable[[Environment], Action | None]


def oracle(environment: Environment) -> Action | None:
    """The reference solution's next action."""
    return environment.oracle()


def no_op(environment: Environment) -> Action | None:
    """The agent that does nothing: it apologises in every turn."""
    return Action(content=NO_OP_REPLY)


def play(environment: Environment, task: TargetTask, player: Player) -> Score:
    """One episode, until it is done, the player has no action any more, or `max_steps` actions were taken."""
    take_turns(environment, environment.reset(task), lambda taken: player(environment), environment.step)
    return environment.score()


@dataclass(frozen=True)
class Row:
    """What one player reached over the tasks of a target. `failed` holds the ids of the tasks without success."""

    target: str
    tasks: int
    successes: int
    mean_reward: float
    failed: tuple[str, ...]


def validate(target: Target, player: Player, tasks: Sequence[TargetTask] | None = None) -> Row:
    """Play every task of every split (or those given) once with `player`."""
    if tasks is None:
        tasks = [task for split in SPLITS for task in target.tasks(split)]
    environment = target.environment()
    scores = [play(environment, task, player) for task in tasks]
    environment.close()
    failed = tuple(task.id for task, score in zip(tasks, scores, strict=True) if not score.success)
    mean = sum(score.reward for score in scores) / len(scores) if scores else 0.0
    return Row(target.name, len(tasks), len(tasks) - len(failed), mean, failed)
