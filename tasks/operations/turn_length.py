"""Whether the policy's turns can say what the target wants: a limit that cuts every right answer off, or a format of
calls that changes them, looks like a model that cannot answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import Action, Observation, TargetTask, ToolCall, canonical_json
from environments.playing import take_turns
from errors import ConfigurationError, EnvironmentFault, TargetError
from models.episodes import Guarded
from models.renderer import Renderer
from tasks.round.context import Context

logger = logging.getLogger("trace")

# Reference solutions that are looked at, and the share that may be impossible to say before the round is refused.
LOOKED_AT, TOLERATED = 40, 0.1


def check_turn_length(context: Context) -> None:
    """Raise `ConfigurationError` when more than a tenth of the target's reference solutions have a turn of more than
    `rollout.max_tokens` tokens, or calls that the format `calls` does not bring back as they were; say so when fewer
    have. A target without reference solutions is taken as it is."""
    most = context.settings.rollout.max_tokens
    tasks = context.tasks("diagnosis")
    apart = max(1, len(tasks) // LOOKED_AT)
    found = [(longest, changed) for task in tasks[::apart] for longest, changed in [_turns(context, task)] if longest]
    every = f"of {len(found)} reference solutions of {context.round.target}"
    lengths = sorted(longest for longest, _ in found)
    cut = sum(longest > most for longest in lengths)
    if cut:
        n = len(lengths)
        # With room to spare; of a few, where that rounds down, at least what leaves no more than the tolerated share.
        enough = lengths[max(int((1 - TOLERATED / 2) * (n - 1)), n - 1 - int(TOLERATED * n))]
        said = f"rollout.max_tokens = {most}, and {cut} {every} have a turn of more tokens, up to {lengths[-1]}"
        _refuse_or_say(cut / len(found), said, f"give at least {enough}")
    changed_calls = [changed for _, changed in found if changed]
    if changed_calls:
        form = context.base.renderer.calls.name
        said = f'calls = "{form}", and {len(changed_calls)} {every} have calls that it changes, as {changed_calls[0]}'
        _refuse_or_say(len(changed_calls) / len(found), said, 'set calls = "json"')


def _refuse_or_say(share: float, said: str, remedy: str) -> None:
    if share > TOLERATED:
        raise ConfigurationError(f"{said}: nobody could solve these tasks; {remedy}")
    logger.warning("%s: these tasks cannot be solved", said)


def _turns(context: Context, task: TargetTask) -> tuple[int, str]:
    """Of the reference solution: tokens of its longest turn, the end included (0 without one), and the first turn whose
    calls are not read back ("" when all are)."""
    renderer, lengths, changed = context.base.renderer, [0], list[str]()
    try:
        environment = Guarded.made(context.target.environment)

        def step(action: Action) -> Observation:
            text = renderer.content(action.as_message(), environment.tools)
            lengths.append(len(renderer.text_ids(text)) + 1)
            if not _read_back(renderer, text, action, environment.tools):
                changed.append(f"{text:.120}")
            return environment.step(action)

        try:
            take_turns(environment, environment.reset(task), lambda taken: environment.oracle(), step)
        finally:
            environment.close()
    except (EnvironmentFault, TargetError):  # the episode itself will tell
        return 0, ""
    return max(lengths), changed[0] if changed else ""


def _read_back(renderer: Renderer, text: str, action: Action, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the text of a turn makes the same calls as the turn. JSON is the one format that says them all, so where
    it is set nothing is wanted."""
    if renderer.calls.name == "json":
        return True
    return _told(renderer.calls.read(text, tools).tool_calls) == _told(action.tool_calls)


def _told(calls: Sequence[ToolCall]) -> str:
    """The calls as JSON: True is not 1 there, and a tuple is a list."""
    said = [[call.name, dict(call.arguments)] for call in calls]
    try:
        return canonical_json(said)
    except (ValueError, TypeError):
        return repr(said)
