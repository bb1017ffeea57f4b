"""Whether the model can be shown what tasks open with. Conversations are written by its chat template, which has a
place for some orders of roles alone: an episode that opens otherwise, with the agent's greeting for one, is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import pairwise

from environments.contract import Message, Target
from environments.picking import of_each_family
from environments.targets.catalogue import is_builtin, without_model
from environments.validation.playing import FAULTS
from errors import TargetError
from models.opening import opened
from models.templates.chat_template import FOLLOWING

logger = logging.getLogger("trace")

# Tasks that are looked at, of all families in turn, and for how long at most.
LOOKED_AT, SECONDS = 20, 2.0


def check_openings(target: Target) -> None:
    """Raise `TargetError` where no task that is looked at opens as the model can be shown it, and warn where some do
    not. Nothing is looked at where a model would be paid for playing the user."""
    playable = None if is_builtin(target) else without_model(target)
    if playable is None:
        return
    began, shown, refused = time.monotonic(), 0, list[str]()
    for task in of_each_family(playable.tasks("diagnosis"))[:LOOKED_AT]:
        if time.monotonic() - began > SECONDS:
            break
        try:
            prompt, first = opened(playable.environment, task)
        except FAULTS:  # told where the kinds of checks are looked at
            continue
        why = _unfit([*prompt.examples, *first])
        shown += not why
        refused += [f"task {task.id!r} has {why}"] if why else []
    if not refused:
        return
    said = (
        f"{len(refused)} of {len(refused) + shown} tasks of {target.name!r} that were looked at open with roles in an "
        f"order that no model is shown: {refused[0]}; let an episode begin with one message of the user, and put what "
        "the agent has said before into it or into `instructions`"
    )
    if not shown:
        raise TargetError(said)
    logger.warning("%s; such episodes are lost and in no figure", said)


def _unfit(messages: Sequence[Message]) -> str:
    """The first role that may not follow the one before it, of all between the instructions and the agent's turn; ""
    where every one may."""
    roles = ["system", *(message.role for message in messages), "assistant"]
    wrong = next((pair for pair in pairwise(roles) if pair not in FOLLOWING), None)
    return f"a turn of {wrong[1]!r} behind one of {wrong[0]!r}" if wrong else ""
