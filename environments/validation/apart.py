"""Whether a generator's scenarios are apart: from the tasks that decide and report, and by their ids from one another.
What is trained on the tasks of validation or test is measured on what it has learnt by heart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from environments.contract import SPLITS, Target, TargetTask, content_hash

DECIDING = ("validation", "test")


def not_apart(target: Target, scenarios: Sequence[TargetTask]) -> list[str]:
    """Reasons against the `scenarios` that the generators of `target` gave.

    Two tasks are the same where the target says so (`Drawable.content`), else where family and payload are equal. That
    is not asked of a target whose payloads do not tell the tasks of one split apart: these may differ in their seed.
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
    if repeating:
        reasons.append(
            f"scenarios: {len(repeating)} of {len(scenarios)} are tasks of {' or '.join(DECIDING)}, e.g. "
            f"{repeating[0].id!r}; let generate() give none that a split has, or the figures are of what was trained on"
        )
    return reasons


def repeated(target: Target) -> str:
    """What of validation and test is a task of another split, too, by the rules of `not_apart`; "" where nothing is."""
    contents = _contents(target, SPLITS)
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
