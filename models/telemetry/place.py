"""Where a process is in its work: the round, the stage and the capability that log lines carry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

# What a number alone would not say.
NAMED = ("round", "seed")


@dataclass(frozen=True)
class Place:
    """`round` is its number as text, `seed` that of a comparison, `of_method` the method that it plays; "" where there
    is none."""

    round: str = ""
    stage: str = ""
    capability: str = ""
    seed: str = ""
    of_method: str = ""

    def fields(self) -> dict[str, str]:
        """What is known, by name."""
        return {name: value for name, value in asdict(self).items() if value}

    def __str__(self) -> str:
        told = {name: f"{name} {value}" if name in NAMED else value for name, value in self.fields().items()}
        compared = [told.pop(name) for name in ("seed", "of_method") if name in told]
        return " ".join([*compared, *told.values()])


# One of a process and not of a thread: a process does one stage at a time, and its threads work on that one.
_now = Place()


def here() -> Place:
    """Where this process is."""
    return _now


@contextmanager
def at(place: Place) -> Iterator[None]:
    """Within the block this process is at `place`."""
    global _now
    before, _now = _now, place
    try:
        yield
    finally:
        _now = before
