"""Whether the policy's turns are long enough for what the target wants: a limit that cuts every right answer off looks
like a model that cannot answer."""

from __future__ import annotations

import logging

from environments.contract import Action, Observation, TargetTask
from environments.playing import take_turns
from errors import ConfigurationError, EnvironmentFault, TargetError
from models.episodes import Guarded
from tasks.round.context import Context

logger = logging.getLogger("trace")

# Reference solutions that are looked at, and the share that may need longer turns before the round is refused.
LOOKED_AT, TOLERATED = 40, 0.1


def check_turn_length(context: Context) -> None:
    """Raise `ConfigurationError` when more than a tenth of the target's reference solutions have a turn of more than
    `rollout.max_tokens` tokens; say so when fewer have. A target without reference solutions is taken as it is."""
    most = context.settings.rollout.max_tokens
    tasks = context.tasks("diagnosis")
    apart = max(1, len(tasks) // LOOKED_AT)
    longest = {task.id: found for task in tasks[::apart] if (found := _longest_turn(context, task))}
    cut = sorted(found for found in longest.values() if found > most)
    if not cut:
        return
    said = (
        f"rollout.max_tokens = {most}, and {len(cut)} of {len(longest)} reference solutions of {context.round.target} "
        f"have a turn of more tokens, up to {cut[-1]}"
    )
    if len(cut) > TOLERATED * len(longest):
        enough = sorted(longest.values())[int((1 - TOLERATED / 2) * (len(longest) - 1))]
        raise ConfigurationError(f"{said}: nobody could solve these tasks; give at least {enough}")
    logger.warning("%s: these tasks cannot be solved", said)


def _longest_turn(context: Context, task: TargetTask) -> int:
    """Tokens of the longest turn of the reference solution, its end included; 0 without one."""
    renderer, lengths = context.base.renderer, [0]
    try:
        environment = Guarded.made(context.target.environment)

        def step(action: Action) -> Observation:
            lengths.append(len(renderer.text_ids(renderer.content(action.as_message()))) + 1)
            return environment.step(action)

        try:
            take_turns(environment, environment.reset(task), lambda taken: environment.oracle(), step)
        finally:
            environment.close()
    except (EnvironmentFault, TargetError):  # the episode itself will tell
        return 0
    return max(lengths)
