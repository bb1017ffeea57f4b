"""What the tasks of a target must be. Trajectories are stored under a task's id and the target's data hash, with no
split and no payload: of two tasks with one id, the second would get the first one's score and never be played."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from environments.contract import SPLITS, Generators, Target, TargetTask
from errors import TargetError, TraceError


def checked_tasks(target: Target) -> Mapping[str, Sequence[TargetTask]]:
    """The fixed tasks of a target by split. Raises TargetError where one is no task of its split, where two have the
    same id, where a split is another one when it is asked for again, where the data hash is no text, where families
    have no lists of capabilities, and where the target's own code fails."""
    data_hash: Any = given(target, "data_hash", lambda: target.data_hash)
    if not isinstance(data_hash, str) or not data_hash:
        raise TargetError(
            f"data_hash of target {target.name!r} is {data_hash!r:.80}; give a text that changes with whatever "
            "decides a score (environments.contract.content_hash makes one)"
        )
    found: dict[str, Sequence[TargetTask]] = {
        split: given(target, f"tasks({split!r})", partial(target.tasks, split)) for split in SPLITS
    }
    for split, tasks in found.items():
        refuse_others(tasks, split)
    refuse_repeats(found)
    for split, tasks in found.items():
        _refuse_others_later(target, split, tasks)
    if isinstance(target, Generators):
        _refuse_other_families(given(target, "families()", target.families), target.name)
    return found


def _refuse_others_later(target: Target, split: str, tasks: Sequence[TargetTask]) -> None:
    """Refuse a split that is another one when it is asked for again: two policies would be compared on tasks that have
    nothing but their ids in common, and each stage would play a part of its own. Tasks may be added meanwhile."""
    again = {task.id: _told(task) for task in given(target, f"tasks({split!r})", partial(target.tasks, split))}
    known = {task.id for task in tasks}
    changed = next((t.id for t in tasks if t.id in again and _told(t) != again[t.id]), None)
    gone = next((task.id for task in tasks if task.id not in again), None)
    # Of a sample some have gone and others have come.
    if changed is None and gone is not None and (again.keys() - known or again.keys().isdisjoint(known)):
        changed = gone
    if changed is None and [t.id for t in tasks if t.id in again] != [i for i in again if i in known]:
        raise TargetError(
            f"tasks({split!r}) of target {target.name!r} gives the tasks in another order when it is asked again; give "
            "them in the same order every time: a round that plays some of them takes these by their places"
        )
    if changed is not None:
        raise TargetError(
            f"tasks({split!r}) of target {target.name!r} gives another task for {changed!r}, or none, when it is asked "
            "again; give the same tasks every time: draw them from random.Random with a seed of your own"
        )


def _told(task: TargetTask) -> list[Any]:
    """What makes a task, as it can be compared; a payload that is no JSON is not."""
    try:
        payload = json.dumps(task.payload, sort_keys=True, default=lambda value: str(type(value)))
    except (TypeError, ValueError, RecursionError):
        payload = ""
    return [task.family, task.seed, payload]


def generated(task: Any, family: str) -> TargetTask:
    """What `Generators.generate` gave for `family`. Raises TargetError where it is no scenario of it."""
    if not isinstance(task, TargetTask):
        raise TargetError(f"generate({family!r}) gave {task!r:.80}; give environments.contract.TargetTask")
    _refuse_other_fields(task, f"generate({family!r})")
    if task.family != family:
        raise TargetError(
            f"generate({family!r}) gave a task of the family {task.family!r}; give one of the family that was asked for"
        )
    return task


def _refuse_other_families(families: Any, name: str) -> None:
    """Refuse what does not say of each family which capabilities it needs. A text in their place would be read letter
    by letter."""
    if not isinstance(families, Mapping):
        raise TargetError(
            f"families() of target {name!r} gave a {type(families).__name__}; give a dict of each family's "
            "capabilities, such as {'refund': ('look_up_order', 'refund_order')}"
        )
    for family, needs in families.items():
        if not isinstance(family, str) or not _are_texts(needs):
            raise TargetError(
                f"families() of target {name!r} gave {family!r:.80} the capabilities {needs!r:.80}; give a tuple of "
                "texts, such as ('look_up_order',), () for none"
            )


def given(target: Target, what: str, ask: Callable[[], Any]) -> Any:
    """What the code of a target gives, which may be a user's."""
    try:
        return ask()
    except TraceError:
        raise
    except Exception as problem:
        raise TargetError(
            f"{what} of target {target.name!r} fails: {type(problem).__name__}: {problem}; mend the target's code, or "
            "give it what it reads"
        ) from problem


def refuse_others(tasks: Sequence[Any], split: str, place: str = "") -> None:
    """Raise TargetError for what is no list of tasks of a split, each with fields as the contract has them: no row of
    the store is without a text as its id and as its family, and a seed. `place` is what they are called, if they are
    not the split itself."""
    place = place or split
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        raise TargetError(f"the tasks of {place} are a {type(tasks).__name__}; give a list")
    for task in tasks:
        if not isinstance(task, TargetTask):
            raise TargetError(f"{place} holds {task!r:.80}; give environments.contract.TargetTask")
        _refuse_other_fields(task, place)
        if task.split != split:
            raise TargetError(
                f"task {task.id!r} of {place} says that its split is {task.split!r}; give each task the split {split!r}"
            )


def _refuse_other_fields(task: TargetTask, place: str) -> None:
    """Raise TargetError for a task with a field that is of another type than its own; `place` says whence it comes."""
    if not isinstance(task.id, str) or not task.id:
        raise TargetError(f"{place} holds a task with the id {task.id!r:.80}; give a text")
    tags: Any = task.capabilities
    for name, fits, wanted in (
        ("family", isinstance(task.family, str), "a text"),
        ("seed", isinstance(task.seed, int), "a whole number"),
        ("payload", isinstance(task.payload, Mapping), "a dict"),
        # A text would be read letter by letter.
        ("capabilities", _are_texts(tags), "a tuple of texts, such as ('look_up_order',)"),
    ):
        if not fits:
            raise TargetError(f"task {task.id!r} of {place} has the {name} {getattr(task, name)!r:.80}; give {wanted}")
    try:
        f"{task.id}{task.family}".encode()
    except UnicodeEncodeError as problem:  # as names of files may be that are no UTF-8
        raise TargetError(f"task {task.id!r:.80} of {place} is not named in Unicode ({problem}); clean it") from None


def _are_texts(listed: Any) -> bool:
    return isinstance(listed, list | tuple | set | frozenset) and all(isinstance(one, str) for one in listed)


def refuse_repeats(where: Mapping[str, Sequence[TargetTask]]) -> None:
    """Raise TargetError where an id is twice among all tasks; `where` says of each list where its tasks are."""
    met: dict[str, str] = {}
    for place, tasks in where.items():
        for task in tasks:
            if task.id in met:
                other = met[task.id]
                places = f"twice in {place}" if other == place else f"in {other} and in {place}"
                raise TargetError(
                    f"task id {task.id!r} is {places}; give every task of a target an id of its own, such as "
                    "f'{split}-{n}': what was played is stored under it, so that one task would get the other's score"
                )
            met[task.id] = place
