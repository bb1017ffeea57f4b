"""A time limit on a call that may never return, and a process that ends with the one that ordered it.

Covered: Python code that loops, and blocking system calls (sleep, sockets, locks with a timeout, child processes),
in the main thread of a process with POSIX signals. Not covered: calls in other threads, where Python delivers no
signal (the call runs without a limit, and a warning says so once), and C code that neither returns nor releases
control to the interpreter; an environment that cannot be trusted so far belongs in the sandbox, which has deadlines
of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("trace.models")

# An `except Exception` in the called code may not swallow the limit, so it is raised again at this interval.
AGAIN_SECONDS = 0.5


class DeadlinePassed(BaseException):
    """The call did not return in time. Not an `Exception`, so that code that catches those cannot go on for ever."""


def within(seconds: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call(...)`, interrupted by `DeadlinePassed` after `seconds` (see above for where)."""
    if threading.current_thread() is not threading.main_thread():
        _warn_once()
        return call(*args, **kwargs)
    armed = True

    def expire(number: int, frame: Any) -> None:
        if armed:
            raise DeadlinePassed

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        return call(*args, **kwargs)
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)


@cache
def _warn_once() -> None:
    logger.warning("environments run outside the main thread: their steps have no time limit")


def end_with_parent() -> None:
    """End this process and all of its group when the other end of its standard input is closed: when the process that
    ordered it is gone, however it went. A launcher hands its own standard input to all that it starts."""

    def wait() -> None:
        sys.stdin.read()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()
