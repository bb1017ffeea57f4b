"""Whether a generator's scenarios are apart: from the tasks that decide and report, and by their ids from one another.
What is trained on the tasks of validation or test is measured on what it has learnt by heart."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from environments.contract import SPLITS, Environment, Target, TargetTask, content_hash
from environments.picking import spread
from environments.targets.third_party.adapter import model_of_user
from environments.task_ids import given
from environments.validation.distinct import said
from environments.validation.playing import FAULTS, OUTSIDE, oracle_policy, play

DECIDING = ("validation", "test")
# Tasks of these splits that scenarios are compared with by what episodes show.
LOOKED_AT = 400


def not_apart(target: Target, scenarios: Sequence[TargetTask]) -> list[str]:
    """Reasons against the `scenarios` that the generators of `target` gave.

    Two tasks are the same where the target says so (`Drawable.content`), else where family and payload are equal, and
    where an agent meets the same: payloads may hold what no episode shows, a seed above all. Payloads are not compared
    where they do not tell the tasks of one split apart: these may differ in their seed. Nothing is played where a model
    would be paid for playing the user.
    """
    reasons, first = [], dict[str, TargetTask]()
    other = next((t for t in scenarios if _whole(first.setdefault(t.id, t)) != _whole(t)), None)
    if other is not None:
        reasons.append(
            f"scenarios: the seeds {first[other.id].seed} and {other.seed} give different scenarios with the id "
            f"{other.id!r}; give each its own, such as f'{{family}}-{{seed}}': what was played is stored under it"
        )
    same, held = _same(target), [target.tasks(split) for split in DECIDING]
    ids = {task.id for tasks in held for task in tasks}
    known = {one for contents in _contents(target, DECIDING).values() for one in contents}
    repeating = [task for task in scenarios if task.id in ids or same(task) in known]
    paid = model_of_user(str(getattr(target, "user", "")))  # a model that plays the user would be asked for each
    if not repeating and not paid and not hasattr(target, "content"):
        repeating = met_alike(target.environment, [task for tasks in held for task in tasks], scenarios)
    if repeating:
        reasons.append(
            f"scenarios: {len(repeating)} of {len(scenarios)} are tasks of {' or '.join(DECIDING)}, e.g. "
            f"{repeating[0].id!r}; let generate() give none that a split has, or the figures are of what was trained on"
        )
    return reasons


def repeated(target: Target) -> str:
    """What of validation and test is a task of another split, too, by the rules of `not_apart`; "" where nothing is.
    Raises TargetError where the target's own `content` fails."""
    contents = given(target, "content()", partial(_contents, target, SPLITS))
    for split, others in (("test", ("diagnosis", "validation")), ("validation", ("diagnosis",))):
        for other in others:
            known = set(contents[other])
            both = [i for i, one in enumerate(contents[split]) if one in known]
            if both:
                return (
                    f"{len(both)} of {len(contents[split])} tasks of {split} are tasks of {other}, too, such as "
                    f"{target.tasks(split)[both[0]].id!r}"
                )
    return ""


def met_alike(
    make: Callable[[], Environment],
    held: Sequence[TargetTask],
    tasks: Sequence[TargetTask],
    seconds: float = math.inf,
) -> list[TargetTask]:
    """The `tasks` in which an agent is shown first what one of `held` shows, and whose reference solution does the same
    and meets the same. At most `LOOKED_AT` of `held` are looked at, and as many of both as there are `seconds` for."""
    environment, began = make(), time.monotonic()
    try:
        opening: dict[str, list[TargetTask]] = {}
        for task in spread(held, LOOKED_AT):
            if time.monotonic() - began > seconds / 2:
                break
            opening.setdefault(_shown(environment, task), []).append(task)
        opening.pop("", None)
        found, solved = list[TargetTask](), dict[str, set[str]]()
        for task in tasks:
            if time.monotonic() - began > seconds:
                break
            shown = _shown(environment, task)
            if shown in opening and shown not in solved:
                solved[shown] = {_solved(environment, other) for other in opening[shown]} - {""}
            if shown in opening and _solved(environment, task) in solved[shown]:
                found.append(task)
        return found
    finally:
        environment.close()


def _shown(environment: Environment, task: TargetTask) -> str:
    """Hash of what an episode begins with; "" where it cannot be begun."""
    try:
        first = environment.reset(task).messages
        return content_hash([environment.instructions, [said(message) for message in first]])
    except OUTSIDE:
        raise
    except FAULTS:
        return ""


def _solved(environment: Environment, task: TargetTask) -> str:
    """Hash of the episode of the reference solution; "" where it ends in a fault."""
    played = play(environment, task, oracle_policy, seed=task.seed)
    return "" if played.error else content_hash([said(message) for message in played.messages])


def _same(target: Target) -> Callable[[TargetTask], str]:
    """What is equal for two tasks that are the same one."""
    content: Callable[[TargetTask], str] | None = getattr(target, "content", None)
    return content or (lambda task: content_hash(_whole(task)))


def _contents(target: Target, splits: Sequence[str]) -> dict[str, list[str]]:
    """What the tasks of each split are; nothing where they are told apart by their seeds alone."""
    same = _same(target)
    found = {split: [same(task) for task in target.tasks(split)] for split in splits}
    told = hasattr(target, "content") or all(len(set(contents)) == len(contents) for contents in found.values())
    return found if told else {split: [] for split in splits}


def _whole(task: TargetTask) -> list[str]:
    try:
        payload = json.dumps(dict(task.payload), sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):  # no JSON: keys of several kinds, or it holds itself
        payload = repr(task.payload)
    return [task.family, payload]
