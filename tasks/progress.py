"""Progress of everything that takes more than two seconds: a bar with rate and time left, or lines where there is no
terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger("trace")
EVERY_SECONDS = 15.0


def track(items: Iterable[T], what: str, total: int, unit: str, note: Callable[[], str] = str) -> Iterator[T]:
    """Yield `items`, showing how many of `total` are done, and what `note` says (such as the cost so far)."""
    if sys.stderr.isatty():
        yield from _bar(items, what, total, unit, note)
        return
    began = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= EVERY_SECONDS and done < total:
            rate = done / (now - began)
            left, more = (total - done) / rate, note()
            logger.info(
                "%s: %d of %d %s, %s, %.0f s left%s", what, done, total, unit, _speed(rate), left, more and f", {more}"
            )
            last = now


def _speed(rate: float) -> str:
    return f"{rate:.1f}/s" if rate >= 0.1 else f"{60 * rate:.1f}/min"


def _bar(items: Iterable[T], what: str, total: int, unit: str, note: Callable[[], str]) -> Iterator[T]:
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, began = progress.add_task(what, total=total, rate="", note=""), time.monotonic()
        for done, item in enumerate(items, 1):
            yield item
            rate = done / max(1e-6, time.monotonic() - began)
            progress.update(task, completed=done, rate=f"{unit} {_speed(rate)}", note=note())
