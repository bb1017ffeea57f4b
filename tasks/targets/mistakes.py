"""Whether a target answers an agent's mistakes: a call without its arguments, with nonsense in them, of no tool, or one
that cannot be read. A small base makes them in every round, and an episode that an environment raises in is lost: it is
in no figure, so that what is left looks better than the agent is."""

from __future__ import annotations

import logging
import time
from itertools import product

from environments.contract import Target
from environments.picking import of_each_family
from environments.targets.catalogue import is_builtin, without_model
from environments.validation.playing import FAULTS
from environments.validation.redteam import ATTACKS, play_attack
from models.episodes import Guarded

logger = logging.getLogger("trace")

# Those of the red team's attacks that an agent which means well makes by mistake, in other words.
_MISTAKES = {
    "mixed_turn": "every tool called without arguments",
    "call_verifier": "tools called that there are not",
    "malformed_calls": "calls that cannot be read",
    "empty_message": "a message without a word",
    "boolean_confusion": "true as every argument",
    "null_confusion": "null as every argument",
    "list_confusion": "a list as every argument",
    "object_confusion": "an object as every argument",
    "empty_string": "an empty text as every argument",
}
# Tasks that are looked at, of all families in turn, and for how long at most.
LOOKED_AT, SECONDS = 5, 2.0


def check_mistakes(target: Target) -> None:
    """Warn where an environment of somebody's own raises on what an agent did. Nothing is looked at where a model would
    be paid for playing the user."""
    playable = None if is_builtin(target) else without_model(target)
    if playable is None:
        return
    tried = [attack for attack in ATTACKS if attack.name in _MISTAKES]
    began, faults, played = time.monotonic(), list[str](), 0
    for task, attack in product(of_each_family(playable.tasks("diagnosis"))[:LOOKED_AT], tried):
        if time.monotonic() - began > SECONDS:
            break
        try:
            environment = Guarded.made(playable.environment)
        except FAULTS:  # it cannot even be made, which is told where its kinds are looked at
            return
        try:
            error = play_attack(environment, task, attack).error
        finally:
            environment.close()
        played += 1
        faults += [f"task {task.id!r}, {_MISTAKES[attack.name]}: {error}"] if error else []
    if faults:
        logger.warning(
            "%d of %d episodes of %s in which an agent makes mistakes ended in a fault of the environment; such "
            "episodes are lost and in no figure, so answer what an agent does wrong with an error observation: %s",
            len(faults), played, target.name, faults[0],
        )  # fmt: skip
