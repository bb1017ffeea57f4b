"""Whether a target's episodes repeat: the same actions on the same task show the same, whatever was played before.

Where one episode leaves something to the next, figures follow the order of the episodes, and an agent is called better
or worse for it. The project's own targets have tests for that; environments to train in are validated (`synthesize`).
"""

from __future__ import annotations

import logging
import time
from itertools import product

from environments.contract import Target, TargetTask
from environments.picking import of_each_family
from environments.targets.catalogue import builtin_names, without_model
from environments.targets.reference_check import Player, no_op, oracle
from environments.validation.playing import Played, play
from errors import EnvironmentFault, TargetError
from models.episodes import Guarded

logger = logging.getLogger("trace")

# Tasks that are looked at, of all families in turn, and for how long at most they are played the first time.
LOOKED_AT, SECONDS = 10, 2.0


def check_repeats(target: Target) -> None:
    """Warn where a reference solution, or doing nothing, comes to something else on the same task when it is played
    again, in the other order. Nothing is looked at where a model would be paid for playing the user."""
    playable = None if target.name in builtin_names() else without_model(target)
    if playable is None:
        return
    players: tuple[Player, ...] = (oracle, no_op)
    began, first = time.monotonic(), list[tuple[TargetTask, Player, Played]]()
    try:
        for task, player in product(of_each_family(playable.tasks("diagnosis"))[:LOOKED_AT], players):
            if time.monotonic() - began > SECONDS:
                break
            first.append((task, player, _played(playable, task, player)))
        other = [
            (task, player, there, here)
            for task, player, there in reversed(first)
            if (here := _played(playable, task, player)).transcript != there.transcript and not there.error
        ]
    except (EnvironmentFault, TargetError):  # it cannot even be made, which is told where its kinds are looked at
        return
    if other:
        task, player, there, here = other[-1]
        what = "its reference solution" if player is oracle else "an agent that does nothing"
        logger.warning(
            "%d of %d episodes of %s came to something else when they were played again: task %r, played by %s, first "
            "%s, then %s; build everything anew from the task in reset, keep nothing in the module, and draw from "
            "random.Random(task.seed) alone: figures follow the order of the episodes else",
            len(other), len(first), target.name, task.id, what, _came_to(there), _came_to(here),
        )  # fmt: skip


def _played(target: Target, task: TargetTask, player: Player) -> Played:
    environment = Guarded.made(target.environment)
    try:
        return play(environment, task, lambda played, messages, rng: player(played))
    finally:
        environment.close()


def _came_to(episode: Played) -> str:
    if episode.score is None:
        return episode.error
    said = next((m.content for m in reversed(episode.messages) if m.role != "assistant"), "")
    return f"{'success' if episode.score.success else 'no success'} (last shown: {said[:80]!r})"
