"""A time limit on a call that may never return, and a process that ends with the one that ordered it.

Covered in the main thread of a process with POSIX signals: Python code that loops, and blocking system calls (sleep,
sockets, locks with a timeout, child processes); the call itself is interrupted. In any other thread Python delivers no
signal, so the call is done by a helper thread, the same one for all calls of a thread: Python code that loops is
interrupted there, too, and a blocking system call is left behind in a thread that never keeps the process alive; its
caller goes on in time. Not covered: C code that does not release control to the interpreter; an environment that cannot
be trusted so far belongs in the sandbox, which has deadlines of its own.

What a call waits for may have a limit of its own, a user played by a model among it: `held` keeps it out of the limit
of the call around it.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("trace.models")

# An `except Exception` in the called code may not swallow the limit, so it is raised again at this interval.
AGAIN_SECONDS = 0.5
# How often it is raised in a helper thread before that thread is left behind.
TRIES = 2
# The most seconds that the end of a process waits for threads that were told to end.
LAST_SECONDS = 1.0


class DeadlinePassed(BaseException):
    """The call did not return in time. Not an `Exception`, so that code that catches those cannot go on for ever."""


class _Limit:
    """The time that a call has left; it stands still while the limit is held. Read in other threads and in a signal
    handler, where a lock could not be taken, so that what belongs together is one tuple."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._state: tuple[float, float | None] = (time.monotonic() + seconds, None)  # its end, and since when held

    @property
    def left(self) -> float:
        end, since = self._state
        return end - (time.monotonic() if since is None else since)

    @property
    def is_held(self) -> bool:
        return self._state[1] is not None

    def hold(self) -> None:
        self._state = (self._state[0], time.monotonic())

    def go_on(self) -> None:
        end, since = self._state
        self._state = (end if since is None else end + time.monotonic() - since, None)

    def over(self, call: Callable[[], T]) -> T:
        """`call()`, with this as the limit that `held` finds in this thread."""
        around, _MINE.limit = _MINE.limit, self
        try:
            return call()
        finally:
            _MINE.limit = around


@contextmanager
def held() -> Iterator[None]:
    """Within, the limit of the call that this thread is in stands still. What is done there needs a limit of its own:
    nothing else ends it."""
    limit = _MINE.limit
    if limit is None or limit.is_held:
        yield
        return
    limit.hold()
    try:
        yield
    finally:
        limit.go_on()


def within(seconds: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call(...)`, ended by `DeadlinePassed` after `seconds` (see above for how)."""
    limit = _Limit(seconds)
    if threading.current_thread() is not threading.main_thread():
        return _helper().call(limit, lambda: call(*args, **kwargs))
    armed = True

    def expire(number: int, frame: Any) -> None:
        if armed and limit.left <= 0:  # the timer goes on where the limit was held
            raise DeadlinePassed

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        return limit.over(lambda: call(*args, **kwargs))
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)


def end_with_parent() -> None:
    """End this process and all of its group when the other end of its standard input is closed: when the process that
    ordered it is gone, however it went. A launcher hands its own standard input to all that it starts."""

    def wait() -> None:
        sys.stdin.read()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()


_ending: set[threading.Thread] = set()  # copied before it is gone through: other threads add to it


def told_to_end(threads: Iterable[threading.Thread]) -> None:
    """Say of daemon threads that they end by themselves as soon as they are done. The end of the process waits a moment
    for them: one that the interpreter's end meets while it ends, with torch loaded, aborts the process (134)."""
    _ending.difference_update([t for t in _ending.copy() if not t.is_alive()])
    _ending.update(threads)


@atexit.register
def _let_them_end() -> None:
    until = time.monotonic() + LAST_SECONDS
    while (left := until - time.monotonic()) > 0 and (alive := [t for t in _ending.copy() if t.is_alive()]):
        alive[0].join(left)


_Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class _Helper:
    """A daemon thread that does the calls of another thread, one after another; it ends with its caller."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self.left = False
        name = f"{threading.current_thread().name} calls"
        self._thread = threading.Thread(target=_do, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        self._calls.put(None)
        if not self.left and not sys.is_finalizing():
            told_to_end([self._thread])

    def call(self, limit: _Limit, call: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self._calls.put((lambda: limit.over(call), done))
        while (left := limit.left) > 0:
            if wait([done], max(left, AGAIN_SECONDS) if limit.is_held else left).done:
                return done.result()
        self.left = True
        self._calls.put(None)
        for _ in range(TRIES):
            _interrupt(self._thread)
            if wait([done], AGAIN_SECONDS).done:
                break
        else:
            said = "a call that did not return within %s s is left behind in %s"
            logger.warning(said, limit.seconds, self._thread.name)
        raise DeadlinePassed


def _do(calls: _Calls) -> None:
    """Do calls until None comes. What a call raises belongs to its caller, a `DeadlinePassed` among it."""
    while (given := calls.get()) is not None:
        call, done = given
        try:
            result = call()
        except BaseException as problem:
            done.set_exception(problem)
        else:
            done.set_result(result)
        del given, call, done  # while this thread waits it holds nothing of the last call


def _interrupt(thread: threading.Thread) -> None:
    """Raise `DeadlinePassed` in a thread at its next bytecode: in code that loops, not in a system call that blocks."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(DeadlinePassed))


class _Mine(threading.local):
    helper: _Helper | None = None
    limit: _Limit | None = None


_MINE = _Mine()


def _helper() -> _Helper:
    """This thread's helper; a new one where the last was left behind."""
    if _MINE.helper is None or _MINE.helper.left:
        _MINE.helper = _Helper()
    return _MINE.helper
