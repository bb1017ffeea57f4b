"""Picking some of many, the same whenever it is done: at equal distances, from several lists in turn or
in proportion, by a hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

from environments.contract import TargetTask

Item = TypeVar("Item")


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, the middle of each of so many equal parts: targets list their tasks family by family."""
    count = len(items)
    return list(items) if count <= most else [items[(2 * i + 1) * count // (2 * most)] for i in range(most)]


def in_turn(lists: Iterable[Sequence[Item]]) -> list[Item]:
    """The first of each list, then the second of each, until all are there."""
    waiting = list(lists)
    longest = max(map(len, waiting), default=0)
    return [items[k] for k in range(longest) for items in waiting if k < len(items)]


def in_proportion(lists: Iterable[Sequence[Item]]) -> list[Item]:
    """All items, each list in its order, so that the first so many of them have of each list its share."""
    placed = [((k + 0.5) / len(items), item) for items in lists for k, item in enumerate(items)]
    return [item for _, item in sorted(placed, key=itemgetter(0))]


def of_each_family(tasks: Iterable[TargetTask]) -> list[TargetTask]:
    """The first task of each family, then the second of each, until all are there."""
    families: dict[str, list[TargetTask]] = {}
    for task in tasks:
        families.setdefault(task.family, []).append(task)
    return in_turn(families.values())


def for_training(content: str) -> bool:
    """Whether a content, a hash in hex digits, may be trained on; it is for evaluation otherwise."""
    return int(content[0], 16) < 8
