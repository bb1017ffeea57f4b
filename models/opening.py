"""What a task opens with, asked of an environment that is made for that alone."""

from __future__ import annotations

from collections.abc import Callable

from environments.contract import Environment, Message, Prompt, TargetTask
from models.episodes import Guarded


def opened(make: Callable[[], Environment], task: TargetTask) -> tuple[Prompt, tuple[Message, ...]]:
    """The prompt that a task stands behind, which may be its own, and its first messages. The calls have the limit of
    any episode's. Raises `EnvironmentFault` where the environment fails, and what else `Guarded` raises."""
    environment = Guarded.made(make)
    try:
        first = environment.reset(task).messages
        return Prompt.of(environment), first
    finally:
        environment.close()
