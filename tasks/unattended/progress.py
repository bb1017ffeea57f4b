"""Progress of everything that takes more than two seconds: a bar with rate and time left, or lines where there is no
terminal; and a stopwatch."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

from tasks.unattended.stalls import pulse

logger = logging.getLogger("trace")
EVERY_SECONDS = 15.0


class Meter:
    """Shows, within `with`, how many of `total` are done; `advance` after each, `beat` in between. `done` says how many
    were before, as when a training is resumed: they do not count into the rate. Of `at_once` that run side by side the
    first to end says nothing of the pace: rate and time left are shown from the `at_once`-th on. `bars` is off in a
    process that shares its terminal: lines say which stage and capability they are of, bars do not."""

    bars: ClassVar[bool] = True

    def __init__(self, what: str, total: int, unit: str, done: int = 0, at_once: int = 1) -> None:
        self.what, self.total, self.unit, self.before, self.done = what, total, unit, done, done
        self.at_once = min(at_once, total - done)

    def __enter__(self) -> Meter:
        self._began = self._said = time.monotonic()
        self._bar = _Bar(self) if self.bars and sys.stderr.isatty() else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.close()

    @property
    def rate(self) -> float:
        """Items a second, since this meter began."""
        return (self.done - self.before) / max(1e-6, time.monotonic() - self._began)

    @property
    def pace(self) -> str:
        """The rate as people read it; "" while there is none."""
        return pace(self.rate, self.unit) if self.done - self.before >= self.at_once else ""

    def advance(self, note: str = "", say: bool = False) -> None:
        """One more is done; `note` is shown beside it. In a log, `say` writes a line even if the last one is recent."""
        self.advance_by(1, note, say)

    def advance_by(self, count: int, note: str = "", say: bool = False, stored: int = 0) -> None:
        """So many more are done, at once. `stored` of them were before: they count into no rate."""
        self.done += count
        self.before += stored
        self._tell(note, say)

    def beat(self, note: str = "", moved: bool = True) -> None:
        """Nothing is done yet, but `note` says that work goes on; that nothing has `moved` keeps no run alive."""
        self._tell(note, False, moved)

    def _tell(self, note: str, say: bool, moved: bool = True) -> None:
        if moved:
            pulse()
        now = time.monotonic()
        if self._bar:
            self._bar.show(note)
        elif say or (now - self._said >= EVERY_SECONDS and self.done < self.total):
            left = (self.total - self.done) / max(1e-6, self.rate)
            parts = [f"{self.what}: {self.done} of {self.total} {self.unit}"]
            parts += [self.pace, f"{left:.0f} s left"] if self.pace else []
            logger.info("%s%s", ", ".join(parts), f"; {note}" if note else "")
            self._said = now


class _Bar:
    """The meter on a terminal."""

    def __init__(self, meter: Meter) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.meter = meter
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.progress.start()
        self.task = self.progress.add_task(meter.what, total=meter.total, completed=meter.done, rate="", note="")

    def show(self, note: str) -> None:
        self.progress.update(self.task, completed=self.meter.done, rate=self.meter.pace, note=note)

    def close(self) -> None:
        self.progress.stop()


def pace(rate: float, unit: str) -> str:
    """A rate as people read it: `2.4 episodes/s`, or `31 s each` where that is slower than one in two seconds."""
    return f"{rate:.1f} {unit}/s" if rate >= 0.5 else f"{1 / max(1e-6, rate):.0f} s each"


@dataclass
class Stopwatch:
    """Adds up the seconds spent inside `with`."""

    seconds: float = 0.0
    _began: float = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
