"""What a target draws for a round, looked at before anything is played: validation tasks are played only after all
trainings, and one that was played before is no proof of anything."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, islice

from environments.contract import DRAWN_SPLITS, SPLITS, Draw, Drawable, Generators, Target, TargetTask
from environments.targets.catalogue import is_builtin
from environments.task_ids import generated, given, refuse_others, refuse_repeats
from errors import TargetError, TraceError
from models.episodes import guarded

logger = logging.getLogger("trace")

# Scenarios that are looked at among those that a target generates to train on, of all families in turn, and for how
# long at most.
LOOKED_AT, SECONDS = 200, 2.0


def drawn_for(target: Target, draw: Draw) -> dict[str, list[TargetTask]]:
    """A round's tasks of both splits. Raises TargetError where they are not as the contract has them: tasks of their
    split, each with an id and a content that no other has."""
    known = {content: f"in {split}" for split in SPLITS for content in _contents(target, target.tasks(split))}
    known |= dict.fromkeys(draw.used, "that an earlier round has drawn")
    found: dict[str, list[TargetTask]] = {}
    for split in DRAWN_SPLITS:
        tasks = _drawn(target, split, draw)
        refuse_unlike(target, tasks, split, found)
        if not tasks:
            raise TargetError(f"target {target.name!r} draws no task for {split}; draw some, or leave drawn() out")
        known = _refuse_known(target, tasks, split, known)
        found[split] = list(tasks)
    return found


def refuse_unlike(
    target: Target, tasks: Sequence[TargetTask], split: str, met: Mapping[str, Sequence[TargetTask]]
) -> None:
    """Raise TargetError for what is drawn for a split and is no task of it, or has the id of one of test or of `met`,
    the round's other tasks."""
    refuse_others(tasks, split)
    refuse_repeats({"test": target.tasks("test"), **met, f"the draw of {split}": tasks})


def check_draws(target: Target, seed: int) -> None:
    """Raise TargetError where what somebody's own target draws for the first rounds of a home is not as the contract
    has it (`Drawable`), and say where it says itself that nothing is left. The project's own targets have tests."""
    if is_builtin(target) or not isinstance(target, Drawable):
        return
    draw = Draw(seed, 1)
    found = drawn_for(target, draw)
    for split, tasks in found.items():
        _refuse_change(target, f"drawn({split!r}, ...)", tasks, _drawn(target, split, draw))
    _refuse_trained_on(target, found["validation"], seed)
    used = {content for tasks in found.values() for content in _contents(target, tasks)}
    later = Draw(seed, 2, frozenset(used))
    try:
        second = {split: _drawn(target, split, later) for split in DRAWN_SPLITS}
        families = sorted({task.family for task in found["validation"]})
        more = {family: _further(target, draw, family) for family in families}
        second_more = [task for family in families for task in _further(target, later, family)[1]]
    except TargetError as problem:
        logger.warning("target %s draws too little for further tasks, or for a second round: %s", target.name, problem)
        return
    for split, drawn in second.items():
        _refuse_known(target, drawn, split, dict.fromkeys(used, "that an earlier round has drawn"))
    for family, (one, two) in more.items():
        refuse_unlike(target, two, "validation", found)
        _refuse_known(target, two, "validation", dict.fromkeys(used, "that the round has drawn already"))
        _refuse_change(target, f"further(..., {family!r}, 1)", two[:1], one)
    first = [task for tasks in (*found.values(), *(two for _, two in more.values())) for task in tasks]
    _refuse_ids_again(target, first, [*(task for tasks in second.values() for task in tasks), *second_more])


def _drawn(target: Target, split: str, draw: Draw) -> Sequence[TargetTask]:
    assert isinstance(target, Drawable)
    tasks: Sequence[TargetTask] = given(target, f"drawn({split!r}, ...)", partial(target.drawn, split, draw))
    return tasks


def _further(target: Target, draw: Draw, family: str) -> tuple[Sequence[TargetTask], Sequence[TargetTask]]:
    """One further task of a family, and two of them."""
    assert isinstance(target, Drawable)
    one, two = (given(target, "further(...)", partial(target.further, draw, family, count)) for count in (1, 2))
    return one, two


def _contents(target: Target, tasks: Sequence[TargetTask]) -> list[str]:
    assert isinstance(target, Drawable)
    contents: list[str] = given(target, "content()", lambda: [target.content(task) for task in tasks])
    other = next((content for content in contents if not isinstance(content, str)), None)
    if other is not None:
        raise TargetError(
            f"content() of target {target.name!r} gave {other!r:.80}; give a text (environments.contract.content_hash "
            "makes one)"
        )
    return contents


def _refuse_known(target: Target, tasks: Sequence[TargetTask], split: str, known: Mapping[str, str]) -> dict[str, str]:
    """Where each content is, with those of `tasks`. Raises TargetError where one of them is there already."""
    where = dict(known)
    for task, content in zip(tasks, _contents(target, tasks), strict=True):
        if content in where:
            raise TargetError(
                f"task {task.id!r}, drawn for {split}, has the content of one {where[content]}; draw none that a fixed "
                "split, the round's other tasks or an earlier round have (Draw.used), because what is learnt by heart "
                "proves nothing; or let content() tell the two apart"
            )
        where[content] = f"that is drawn for {split}, too"
    return where


def _refuse_trained_on(target: Target, tasks: Sequence[TargetTask], seed: int) -> None:
    """Raise TargetError where one of the target's scenarios to train on has the content of a task that is drawn for
    validation."""
    known = dict(zip(_contents(target, tasks), (task.id for task in tasks), strict=True))
    for what, content in _trained_on(target, seed):
        if content in known:
            raise TargetError(
                f"{what} of target {target.name!r} has the content of task {known[content]!r}, which is drawn for "
                "validation; let generate() give none that drawn() can give (divide all contents by their hash, say), "
                "because what is learnt by heart proves nothing"
            )


def _trained_on(target: Target, seed: int) -> Iterator[tuple[str, str]]:
    """Calls of `generate`, and the contents of what they give. Those that fail are told where environments are composed
    of them."""
    if not isinstance(target, Generators):
        return
    families = sorted(given(target, "families()", target.families))
    numbers, began = random.Random(seed), time.monotonic()
    for family in islice(cycle(families), LOOKED_AT):
        if time.monotonic() - began > SECONDS:
            return
        number, found = numbers.randrange(10**9), list[str]()
        with suppress(TraceError):
            found = _contents(
                target, [generated(guarded(SECONDS, "generate", target.generate, family, number), family)]
            )
        yield from ((f"generate({family!r}, {number})", content) for content in found)


def _refuse_ids_again(target: Target, first: Sequence[TargetTask], second: Sequence[TargetTask]) -> None:
    """Refuse ids that stand for other tasks in a later round: the router and `compare` would take two for one."""
    known = dict(zip([task.id for task in first], _contents(target, first), strict=True))
    for task, content in zip(second, _contents(target, second), strict=True):
        if known.get(task.id, content) != content:
            raise TargetError(
                f"task {task.id!r}, drawn for a second round, has the id of another task that the first one drew; give "
                "each an id that stands for it in all rounds, such as one that begins with Draw.number: what is known "
                "of tasks from several nights is told apart by it"
            )


def _refuse_change(target: Target, what: str, tasks: Sequence[TargetTask], again: Sequence[TargetTask]) -> None:
    told, now = ([*zip([t.id for t in some], _contents(target, some), strict=True)] for some in (tasks, again))
    if told != now:
        raise TargetError(
            f"{what} of target {target.name!r} gives other tasks when it is asked again; decide them by the draw "
            "alone, and let fewer further tasks be the first of more"
        )
