"""Progress of everything that takes more than two seconds: a bar with rate and time left, or lines where there is no
terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger("trace")
EVERY_SECONDS = 15.0


def track(items: Iterable[T], what: str, total: int, unit: str) -> Iterator[T]:
    """Yield `items`, showing how many of `total` are done."""
    if sys.stderr.isatty():
        yield from _bar(items, what, total, unit)
        return
    began = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= EVERY_SECONDS and done < total:
            rate = done / (now - began)
            logger.info("%s: %d of %d %s, %.1f/s, %.0f s left", what, done, total, unit, rate, (total - done) / rate)
            last = now


def _bar(items: Iterable[T], what: str, total: int, unit: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, began = progress.add_task(what, total=total, rate=""), time.monotonic()
        for done, item in enumerate(items, 1):
            yield item
            rate = done / max(1e-6, time.monotonic() - began)
            progress.update(task, completed=done, rate=f"{rate:.1f} {unit}/s")
