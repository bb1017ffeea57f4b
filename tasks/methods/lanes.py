"""The methods of one seed in lanes that can be played side by side: those that work in one home are one lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.methods.catalogue import EVERY


@dataclass(frozen=True)
class Lane:
    """Methods that one process plays in turn, in the home of the method `home` ("": the seed's own); `after` are the
    homes of lanes whose work they take, which are played before it."""

    home: str
    methods: tuple[str, ...]
    after: frozenset[str]

    @property
    def name(self) -> str:
        """What it is called: by all that it plays."""
        return " + ".join(self.methods)


def plays_first(name: str) -> bool:
    """Whether a method belongs before all lanes, with the diagnosis: what it plays every other may be lent."""
    method = EVERY[name]
    return not (method.place(name) or method.inherits or method.needs)


def lanes(names: Sequence[str]) -> list[Lane]:
    """The lanes of the methods that are still to be played. Those that take longest come first, so that none of them is
    left for the end: those that train most adapters, what has to wait for them counted, and of these the last in the
    catalogue, which holds whole rounds."""
    homes: dict[str, list[str]] = {}
    for name in names:
        homes.setdefault(EVERY[name].place(name), []).append(name)
    found = [Lane(home, tuple(methods), _after(methods, names) - {home}) for home, methods in homes.items()]
    order = list(EVERY)

    def length(lane: Lane) -> tuple[int, int]:
        counted = [lane, *(one for one in found if lane.home in one.after)]
        return sum(EVERY[n].trains for one in counted for n in one.methods), order.index(lane.methods[-1])

    return sorted(found, key=length, reverse=True)


def _after(methods: Sequence[str], owed: Sequence[str]) -> frozenset[str]:
    """The homes of what these methods need, as far as that is still to be played."""
    return frozenset(EVERY[n].place(n) for name in methods for n in EVERY[name].needs if n in owed)
