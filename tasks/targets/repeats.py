"""Whether a target's episodes repeat: the same actions on the same task show the same, whatever was played before, and
whatever is played at the same time.

Where one episode leaves something to the next, figures follow the order of the episodes, and an agent is called better
or worse for it. Where two that are open at once share their state, as all of a batch are, each is judged by the last
one's. The project's own targets have tests for that; environments to train in are validated (`synthesize`).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from itertools import product

from environments.contract import Action, Environment, Message, Target, TargetTask
from environments.picking import of_each_family
from environments.targets.catalogue import is_builtin, without_model
from environments.targets.reference_check import Player, no_op, oracle
from environments.validation.playing import Played, play
from errors import EnvironmentFault, TargetError
from models.episodes import Guarded
from tasks.targets.kinds import InTime

logger = logging.getLogger("trace")

# Tasks that are looked at, of all families in turn, and for how long at most they are played the first time.
LOOKED_AT, SECONDS = 10, 2.0


def check_repeats(target: Target) -> None:
    """Warn where a reference solution, or doing nothing, comes to something else on the same task when it is played
    again, in the other order and with another episode in its middle. Nothing is looked at where a model would be paid
    for playing the user."""
    playable = None if is_builtin(target) else without_model(target)
    if playable is None:
        return
    players: tuple[Player, ...] = (oracle, no_op)
    began, first = time.monotonic(), list[tuple[TargetTask, Player, Played]]()
    try:
        for task, player in product(of_each_family(playable.tasks("diagnosis"))[:LOOKED_AT], players):
            if time.monotonic() - began > SECONDS:
                break
            in_time = InTime(player)
            there = _played(playable, task, in_time)
            if not in_time.stopped:
                first.append((task, player, there))
        other = [
            (task, player, there, here)
            for i, (task, player, there) in reversed(list(enumerate(first)))
            if (here := _played(playable, task, player, first[i - 1][:2])).transcript != there.transcript
            and not there.error
        ]
    except (EnvironmentFault, TargetError):  # it cannot even be made, which is told where its kinds are looked at
        return
    if other:
        task, player, there, here = other[-1]
        what = "its reference solution" if player is oracle else "an agent that does nothing"
        logger.warning(
            "%d of %d episodes of %s came to something else when they were played again, each with another one in its "
            "middle: task %r, played by %s, first %s, then %s; build everything anew from the task in reset, keep it "
            "in the environment, nothing in the module or class, because many episodes are open at once, and draw from "
            "random.Random(task.seed) alone: figures follow what else is played",
            len(other), len(first), target.name, task.id, what, _came_to(there), _came_to(here),
        )  # fmt: skip


def _played(
    target: Target, task: TargetTask, player: Player, between: tuple[TargetTask, Player] | None = None
) -> Played:
    """An episode; with `between`, a whole other one is played after its first observation."""
    waiting = [between] if between else []

    def act(played: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
        while waiting:
            _played(target, *waiting.pop())
        return player(played)

    environment = Guarded.made(target.environment)
    try:
        return play(environment, task, act)
    finally:
        environment.close()


def _came_to(episode: Played) -> str:
    if episode.score is None:
        return episode.error
    said = next((m.content for m in reversed(episode.messages) if m.role != "assistant"), "")
    return f"{'success' if episode.score.success else 'no success'} (last shown: {said[:80]!r})"
