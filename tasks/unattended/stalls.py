"""A run that hangs ends itself: no progress for `limits.idle_minutes`, and the process writes where every thread stands
and exits, so that whoever started it sees a death, the stage's lease runs out, and the next run takes over.

The watch is the interpreter's own (`faulthandler`): a thread in C, which also finds a process whose interpreter stands
still. A heartbeat says that a process lives; this says that its work moves.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FILE = "hung.txt"
# Arming costs a thread; progress may come a thousand times a second.
MOST_OFTEN = 1.0


class _Watch:
    """The one watch of this process: the interpreter has one."""

    seconds = 0.0
    file: IO[str] | None = None
    armed = 0.0


@contextmanager
def watched(minutes: float, folder: Path, shared: bool = False) -> Iterator[None]:
    """Within, the process ends when `pulse` was not called for `minutes` (0: never); `folder`/hung.txt has the
    stacks. With `shared` the file is left where it is: processes that began before have it open."""
    if minutes <= 0:
        yield
        return
    with (folder / FILE).open("a", encoding="utf-8") as file:
        _Watch.seconds, _Watch.file = 60 * minutes, file
        try:
            _arm()
            yield
        finally:
            _Watch.seconds, _Watch.file = 0.0, None
            faulthandler.cancel_dump_traceback_later()
    if not shared:
        _drop_empty(folder)


def pulse() -> None:
    """Work has moved."""
    if _Watch.seconds and time.monotonic() - _Watch.armed >= min(MOST_OFTEN, _Watch.seconds / 10):
        _arm()


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, nothing need move: a person is waited for."""
    seconds, _Watch.seconds = _Watch.seconds, 0.0
    faulthandler.cancel_dump_traceback_later()
    try:
        yield
    finally:
        _Watch.seconds = seconds
        if seconds:
            _arm()


def hung_before(folder: Path) -> Path | None:
    """Where the last process of a round left its stacks when it hung; told once, the file is then put aside."""
    _drop_empty(folder)
    left = folder / FILE
    if not left.exists():
        return None
    return left.rename(folder / f"hung-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.txt")


def _arm() -> None:
    assert _Watch.file is not None
    _Watch.armed = time.monotonic()
    faulthandler.dump_traceback_later(_Watch.seconds, exit=True, file=_Watch.file)


def _drop_empty(folder: Path) -> None:
    with suppress(FileNotFoundError):
        if (folder / FILE).stat().st_size == 0:
            (folder / FILE).unlink()
