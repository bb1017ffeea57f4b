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

from db.ledger import owner_name
from tasks.unattended.alive import is_own_or_ended

# A file for each process that is watched, hung.HOST.PID.RANDOM.txt: one watch never takes another's away.
FILES, START, END = "hung.*", "hung.", ".txt"
# Arming costs a thread; progress may come a thousand times a second.
MOST_OFTEN = 1.0


class _Watch:
    """The one watch of this process: the interpreter has one."""

    seconds = 0.0
    file: IO[str] | None = None
    path: Path | None = None
    armed = 0.0


@contextmanager
def watched(minutes: float, folder: Path) -> Iterator[None]:
    """Within, the process ends when `pulse` was not called for `minutes` (0: never); its own file in `folder`,
    hung.HOST.PID.RANDOM.txt, has the stacks."""
    if minutes <= 0:
        yield
        return
    path = folder / f"{START}{owner_name().replace(':', '.')}{END}"
    try:
        with path.open("a", encoding="utf-8") as file:
            _Watch.seconds, _Watch.file, _Watch.path = 60 * minutes, file, path
            try:
                _arm()
                yield
            finally:
                _Watch.seconds, _Watch.file, _Watch.path = 0.0, None, None
                faulthandler.cancel_dump_traceback_later()
    finally:  # a round that ends with an error has not hung
        _drop_empty(path)


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
    """Where the last process of a round left its stacks when it hung. All that were left are put aside (hung-WHEN...),
    so they are told once. A file that a living process has open stays, also that of this one."""
    aside = list[tuple[float, Path]]()
    for left in folder.glob(FILES):
        if left == _Watch.path:
            continue
        with suppress(FileNotFoundError):  # another process puts it aside
            found = left.stat()
            if found.st_size == 0:
                _drop_of_ended(left)
                continue
            when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(found.st_mtime))
            aside.append((found.st_mtime, left.rename(folder / left.name.replace("hung", f"hung-{when}", 1))))
    return max(aside)[1] if aside else None


def _arm() -> None:
    assert _Watch.file is not None
    _Watch.armed = time.monotonic()
    faulthandler.dump_traceback_later(_Watch.seconds, exit=True, file=_Watch.file)


def _drop_empty(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.stat().st_size == 0:
            path.unlink()


def _drop_of_ended(empty: Path) -> None:
    """Remove the file of a process of this machine that was ended otherwise. Of another machine's nothing is known."""
    owner = ":".join(empty.name.removeprefix(START).removesuffix(END).rsplit(".", 2))
    if is_own_or_ended(owner):
        empty.unlink()
