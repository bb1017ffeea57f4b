"""The kinds of a target's checks, which are capabilities to the checks analyst: looked at before anything is played,
because what is wrong with them would else be found after hours of rollouts."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from itertools import product

from db import GENERALIST
from environments.contract import SPLITS, Action, Environment, Generators, Target, TargetTask
from environments.picking import of_each_family
from environments.scores import checked_score
from environments.targets.catalogue import without_model
from environments.targets.reference_check import Player, no_op, oracle, play
from errors import EnvironmentFault, TargetError
from models.episodes import Guarded
from settings import Settings

logger = logging.getLogger("trace")

_KIND = re.compile(r"[a-z0-9_]+")
# The adapter of all successes, and the gate's verdict on a release as a whole, stand beside capabilities by name.
_TAKEN = (GENERALIST, "release")
# Tasks that are looked at, of all families in turn, and for how long at most.
LOOKED_AT, SECONDS = 20, 5.0
# The longest that one episode is played in such a look, in seconds: that of an agent that does nothing may have no end.
LONGEST = 10.0


def nameless(kinds: Iterable[str]) -> dict[str, str]:
    """Kinds that cannot name a capability, and what to do: adapters, folders and what Prefect shows are named by it."""
    found: dict[str, str] = {}
    for kind in kinds:
        if kind in _TAKEN:
            found[kind] = "names something else in a round; give Check.kind another name"
        elif not _KIND.fullmatch(kind):
            found[kind] = (
                "cannot name a capability; give Check.kind in snake_case (a-z, 0-9 and _, such as 'ask_missing_fact')"
            )
    return found


def check_kinds(settings: Settings, target: Target) -> None:
    """Raise `TargetError` where no episode can be played, and where the checks analyst could do nothing with the kinds
    of required checks that the target's reference solutions, and doing nothing, show: one cannot name a capability, or
    environments would be composed and none of the kinds is a capability of a family. Say so where no check is required
    at all, and where a model names what is lacking and environments are composed by name. A kind that only other
    episodes show is left out later (`tasks/contrast.py`). Nothing is looked at where a model would be paid for playing
    the user."""
    if settings.analyst.kind == "llm" and settings.synthesizer.kind == "generators" and isinstance(target, Generators):
        logger.warning(
            "analyst.kind = 'llm' has a model name what is lacking, and environments are composed of the generators of "
            "%s for the names that its families() need alone (%s): for any other name nothing is trained; set "
            "synthesizer.kind = 'llm' to have environments written for it",
            target.name,
            _listed({need for needs in target.families().values() for need in needs}),
        )
    playable = without_model(target)
    if settings.analyst.kind != "checks" or playable is None:
        return
    kinds, looked_at = _shown(playable)
    for kind, why in nameless(sorted(kinds)).items():
        raise TargetError(f"target {target.name!r} has checks of the kind {kind!r}, which {why}")
    if not kinds:
        logger.warning(
            "no score of %s had a required check, where its reference solutions and doing nothing were tried: a round "
            "names what is lacking by Check.kind, so it may find nothing; give Score.checks, or set analyst.kind = "
            "'llm'",
            target.name,
        )
    elif settings.synthesizer.kind == "generators" and isinstance(target, Generators):
        families = target.families()
        _refuse_strangers(target.name, kinds, {need for needs in families.values() for need in needs})
        _tell_of_unseen(target.name, kinds, {need for f in looked_at for need in families.get(f, ())})
        _tell_of_families(target, set(families))


def _refuse_strangers(name: str, kinds: set[str], tags: set[str]) -> None:
    """Refuse kinds of which none is a capability that a family needs: nothing could be composed for any of them."""
    if not kinds & tags:
        raise TargetError(
            f"target {name!r} has checks of the kinds {_listed(kinds)}, and its families() need {_listed(tags)}: none "
            "is in both, so that no environment could be composed for what is lacking; name a capability alike in "
            "Check.kind and in families()"
        )


def _tell_of_unseen(name: str, kinds: set[str], tags: set[str]) -> None:
    """Tell of capabilities that no check is about: no round can find that one is lacking, and none trains it."""
    if unseen := tags - kinds:
        others = kinds - tags
        logger.warning(
            "families() of %s need %s, and no required check is of that kind where reference solutions and doing "
            "nothing were tried, so a round never trains it%s; name a capability alike in Check.kind and in families()",
            name, _listed(unseen), f" (of no family's kinds are {_listed(others)})" if others else "",
        )  # fmt: skip


def _tell_of_families(target: Target, known: set[str]) -> None:
    """Tell of families that are called one way by tasks and another way by `families()`: what is trained for such a
    family is proven by no task."""
    met = {task.family for split in SPLITS for task in target.tasks(split)}
    if met - known and known - met:
        logger.warning(
            "tasks of %s are of the families %s, which families() has not, and families() has %s, of which there is no "
            "task; name a family alike in TargetTask.family and in families()",
            target.name, _listed(met - known), _listed(known - met),
        )  # fmt: skip


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names)[:5])) + (", ..." if len(names) > 5 else "") or "nothing"


def _shown(target: Target) -> tuple[set[str], set[str]]:
    """Kinds of required checks, and the families whose reference solutions showed theirs. Raises `TargetError` where no
    episode at all can be played; one that fails beside others is told, because an agent that plays like it loses the
    episode."""
    began = time.monotonic()
    shown, faults, looked_at = list[set[str]](), list[str](), set[str]()
    for task, player in product(of_each_family(target.tasks("diagnosis"))[:LOOKED_AT], (oracle, no_op)):
        if time.monotonic() - began > SECONDS:
            break
        in_time = InTime(player)
        try:
            shown.append(_kinds(target, task, in_time))
            looked_at |= {task.family} if player is oracle and not in_time.stopped else set()
        except (EnvironmentFault, TargetError) as fault:
            if in_time.stopped:  # only what has ended has to have a score
                break
            what = "its reference solution" if player is oracle else "an agent that does nothing"
            faults.append(f"task {task.id!r} of target {target.name!r}, played by {what}: {fault}")
    if faults and not shown:
        raise TargetError(f"no episode could be played; {faults[0]}")
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        logger.warning(
            "what fails here without a model loses an agent's episode that fails alike: %s%s", faults[0], more
        )
    return set[str]().union(*shown), looked_at


class InTime:
    """A player who stops in an episode that has taken `LONGEST`: a slow environment may have many steps."""

    def __init__(self, player: Player) -> None:
        self.player, self.until, self.stopped = player, time.monotonic() + LONGEST, False

    def __call__(self, environment: Environment) -> Action | None:
        self.stopped = time.monotonic() > self.until
        return None if self.stopped else self.player(environment)


def _kinds(target: Target, task: TargetTask, player: Player) -> set[str]:
    environment = Guarded.made(target.environment)
    try:
        return {check.kind for check in checked_score(play(environment, task, player)).checks if check.required}
    finally:
        environment.close()
