"""What code may take of the machine: processor time, by which it is judged, and time on the clock, where it waits.

By the clock alone, sound code would be refused for the load beside it: a busy machine gives a process little of its
time. Processor time passes only while the code itself runs. Code that sleeps or blocks uses none of it, so there is a
limit on the clock as well, which is far wider.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

# Seconds for which a limit that is all but reached is waited for.
_LOOK = 0.01


def processor_seconds(pid: int) -> float:
    """Seconds of processor time that all threads of a process have used, by the kernel's own clock of that process
    (clock_getcpuclockid(3)), which no code in it can set. Raises `OSError` where there is no such process or clock."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True)
class TimeLimit:
    """Seconds of processor time and, as a backstop, seconds on the clock. An infinite one is no limit."""

    processor: float
    clock: float

    def without(self, processor: float, clock: float) -> TimeLimit:
        """What is left after so many seconds of each."""
        return TimeLimit(max(0.0, self.processor - processor), max(0.0, self.clock - clock))


class Allowance:
    """What code has used since this was made, against its limit. `used` gives seconds of processor time up to now; it
    may raise `OSError` once what it measures has ended, and what was read last holds then."""

    def __init__(self, limit: TimeLimit, used: Callable[[], float]) -> None:
        self.limit, self._used, self._last = limit, used, 0.0
        self._began = time.monotonic()
        try:
            self._before = used()
        except OSError:
            self._before = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds on the clock."""
        return time.monotonic() - self._began

    @property
    def used(self) -> float:
        """Seconds of processor time."""
        with suppress(OSError):
            self._last = max(self._last, self._used() - self._before)
        return self._last

    @property
    def pause(self) -> float:
        """Seconds from now before which no limit can be passed, for one thread at a time."""
        ends = self.limit.clock - self.elapsed
        if math.isfinite(self.limit.processor):
            ends = min(ends, max(self.limit.processor - self.used, _LOOK))
        return max(0.0, ends)

    def over(self) -> str:
        """The limit that is passed, in words; "" while none is."""
        if self.used >= self.limit.processor:
            return f"{self.limit.processor:g} s of processor time"
        return f"{self.limit.clock:g} s on the clock" if self.elapsed >= self.limit.clock else ""

    def spent(self) -> str:
        """How much of each limit was used, in words."""
        clock = f"{self.elapsed:.2f} of {self.limit.clock:g} s on the clock"
        if not math.isfinite(self.limit.processor):
            return f"used: {clock}"
        return f"used: {self.used:.2f} of {self.limit.processor:g} s of processor time, {clock}"
