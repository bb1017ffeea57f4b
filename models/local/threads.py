"""Parts of a pass side by side, each in a thread of its own with its share of torch's threads.

A product of matrices gains nearly twice from a second thread; the small operations around it gain nothing, and take as
long as the products do. Two halves of the rows, each computed with one thread, gain in both.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import accumulate
from typing import TypeVar

import torch

T = TypeVar("T")

SWITCH_SECONDS = 1e-4
MOST = 256  # threads; there are no more than were needed at once

_here = threading.local()
_pools: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pools.clear)  # a child has none of the threads


def most_parts() -> int:
    """Parts that gain from being computed side by side here: torch's threads, one within such a part."""
    return 1 if getattr(_here, "inside", False) else torch.get_num_threads()


def cut(costs: Sequence[float], parts: int) -> list[slice]:
    """At most `parts` slices of things in a row, of about equal cost; none is empty."""
    total = sum(costs)
    middles = [end - cost / 2 for end, cost in zip(accumulate(costs), costs, strict=True)]
    found, first = [], 0
    for part in range(1, parts + 1):
        last = sum(middle <= total * part / parts for middle in middles)
        if last > first:
            found.append(slice(first, last))
            first = last
    return found


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What `calls` return, at most `most_parts()` of them. They are computed under the caller's modes of gradient,
    inference and autocast. All are over before this returns, or raises what the first of them raised."""
    if len(calls) == 1:
        return [calls[0]()]
    threads = torch.get_num_threads()
    if not _pools:
        _pools.append(ThreadPoolExecutor(MOST, "parts"))
    share, modes = max(1, threads // len(calls)), _Modes()
    with _turns:
        futures = [_pools[0].submit(_call, call, share, modes) for call in calls]
        try:
            wait(futures)
            return [future.result() for future in futures]
        finally:
            wait(futures)
            if modes.resized:  # threads that are yet to come begin with what was set last in any
                torch.set_num_threads(threads)


class _Turns:
    """Within, threads that wait for their turn at Python ask for it after `SWITCH_SECONDS`, not after 5 ms: parts take
    turns between operations. Environments in threads of their own lose by it, so it is not set for good."""

    def __init__(self) -> None:
        self._lock, self._within, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_SECONDS)
            self._within += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                sys.setswitchinterval(self._before)


_turns = _Turns()


class _Modes:
    """Modes of torch that belong to a thread, as they are where this is made."""

    def __init__(self) -> None:
        self.inference, self.gradient = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.autocast, self.dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.resized = False

    def entered(self) -> ExitStack:
        """These modes, until what this returns is closed."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.gradient))
        stack.enter_context(torch.autocast("cpu", self.dtype, enabled=self.autocast))
        return stack


def _call(call: Callable[[], T], share: int, modes: _Modes) -> T:
    _here.inside = True
    if torch.get_num_threads() != share:
        torch.set_num_threads(share)
        modes.resized = True
    with modes.entered():
        return call()
