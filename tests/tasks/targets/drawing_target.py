"""A target that draws: twenty numbers for each split of a round."""

from __future__ import annotations

from collections.abc import Sequence

from environments.contract import Draw, TargetTask
from tests.tasks.counting_target import CountingTarget


def numbered(name: str, split: str, first: int, count: int) -> list[TargetTask]:
    return [TargetTask(f"{name}-{n}", split, "ab"[n % 2], n, {"n": n}) for n in range(first, first + count)]


class DrawingTarget(CountingTarget):
    """A round's diagnosis begins at its number times a thousand, its validation behind that."""

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return numbered(split, split, -40 * ("diagnosis", "validation", "test").index(split) - 40, 20)

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        first = 1000 * draw.number + 100 * (split == "validation")
        return numbered(f"{split}-drawn", split, first, 20)

    def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        found = numbered("further", "validation", 1000 * draw.number + 500, 2 * count)
        return [task for task in found if task.family == family]

    def content(self, task: TargetTask) -> str:
        return str(task.payload["n"])
