"""A module and the workers that run it one after another: one that was killed is replaced."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from environments.sandbox.workers import (
    DEFAULT_LIMITS,
    SandboxLevel,
    SandboxLimits,
    Worker,
    WorkerGone,
    choose_level,
)

# How often a call that never reached a worker is given to the next one. Of those that wait for a worker, several may
# be what kills it, one after another.
_NEXT_WORKERS = 8


class WorkerPool:
    """A module's worker, replaced when it dies. Safe to share between threads; `restarts` counts the replacements."""

    def __init__(self, source: str, level: SandboxLevel | None = None, limits: SandboxLimits = DEFAULT_LIMITS) -> None:
        self.source, self.limits = source, limits
        self.level = level or choose_level()
        self.restarts = 0
        self._used = 0.0
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def call(self, function: str, arguments: Sequence[Any] = ()) -> Any:
        """As `Worker.call`. A call that kills the worker raises, and it alone: those that waited for that worker, and
        the next one, find a new one."""
        for left in reversed(range(_NEXT_WORKERS)):
            worker = self._current()
            try:
                return worker.call(function, arguments)
            except WorkerGone:
                if not left or self._worker is None:  # None: the pool was closed meanwhile
                    raise
        raise AssertionError("unreachable")

    @property
    def used(self) -> float:
        """Seconds of processor time that the module's code has taken in all workers."""
        with self._lock:
            return self._used + (self._worker.used if self._worker is not None else 0.0)

    def names(self) -> tuple[str, ...]:
        """The module's public names."""
        return self._current().names

    def close(self) -> None:
        """End the worker; a later call starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.kill()
                self._used += self._worker.used
                self._worker = None

    def _current(self) -> Worker:
        with self._lock:
            if self._worker is None or not self._worker.alive:
                dead, self._worker = self._worker, Worker(self.source, self.level, self.limits)
                if dead is not None:
                    self.restarts += 1
                    self._used += dead.used
            return self._worker
