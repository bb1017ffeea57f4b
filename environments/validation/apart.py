"""Whether a generator's scenarios are apart: from the tasks that decide and report, and by their ids from one another.
What is trained on the tasks of validation or test is measured on what it has learnt by heart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from environments.contract import Target, TargetTask, content_hash

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
    content: Callable[[TargetTask], str] | None = getattr(target, "content", None)
    same = content or (lambda task: content_hash(_whole(task)))
    held = [target.tasks(split) for split in DECIDING]
    ids = {task.id for tasks in held for task in tasks}
    splits = [[same(task) for task in tasks] for tasks in held]
    told = content is not None or all(len(set(contents)) == len(contents) for contents in splits)
    known = {one for contents in splits for one in contents} if told else set()
    repeating = [task for task in scenarios if task.id in ids or same(task) in known]
    if repeating:
        reasons.append(
            f"scenarios: {len(repeating)} of {len(scenarios)} are tasks of {' or '.join(DECIDING)}, e.g. "
            f"{repeating[0].id!r}; let generate() give none that a split has, or the figures are of what was trained on"
        )
    return reasons


def _whole(task: TargetTask) -> list[str]:
    return [task.family, json.dumps(dict(task.payload), sort_keys=True, default=repr)]
