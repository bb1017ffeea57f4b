"""Threads in which environments are called while turns are sampled: a slow environment, a user played by a model or a
sandbox holds up its own episode and no other.

All calls of one episode go through the same thread, one after another: what an environment keeps may belong to the
thread that made it (a database connection does). Threads that are done wait for the next episodes that this process
plays: to start one, and the one that keeps its deadlines, costs more than most calls into an environment.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from models.deadline import told_to_end

# Threads at most, whatever the number of open episodes: each costs some 30 KiB, and most wait.
MOST = 256


@dataclass(frozen=True)
class Done:
    """A call that returned `value`, or raised `problem`, after `seconds`. `number` is its place among all that were
    started."""

    number: int
    key: str
    then: Callable[[Callable[[], Any]], Any]
    seconds: float
    value: Any = None
    problem: BaseException | None = None

    def result(self) -> Any:
        """What the call returned; raises what it raised."""
        if self.problem is not None:
            raise self.problem
        return self.value


@dataclass(frozen=True)
class _Call:
    """What a lane is to do, and where it puts what came back; `woken` is called after that."""

    number: int
    key: str
    call: Callable[[], Any]
    then: Callable[[Callable[[], Any]], Any]
    done: SimpleQueue[Done]
    woken: Callable[[], object]

    def __call__(self) -> None:
        began, value, problem = time.perf_counter(), None, None
        try:
            value = self.call()
        except BaseException as raised:
            problem = raised
        self.done.put(Done(self.number, self.key, self.then, time.perf_counter() - began, value, problem))
        self.woken()


class _Lane:
    """A thread that does calls one after another."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()
        _made.add(self)

    def put(self, call: _Call) -> None:
        self._calls.put(call)

    def free(self) -> None:
        """Behind the calls that it has, others may use it; one that never comes back from a call is used no more."""
        self._calls.put(lambda: _free.append(self))

    def end(self) -> None:
        """Behind the calls that it has, the thread ends."""
        told_to_end([self.thread])
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # while this thread waits it holds nothing of the last call


_made: set[_Lane] = set()
_free: deque[_Lane] = deque()


def _forget_all() -> None:
    _made.clear()
    _free.clear()


os.register_at_fork(after_in_child=_forget_all)  # a child has none of the threads


@atexit.register  # done before the end of the process waits for those that were told (`models/deadline.py`)
def _end_all() -> None:
    for lane in _made.copy():
        lane.end()
    _forget_all()


class Lanes:
    """At most `most` threads. Used from one thread; `woken` is called, in a lane's thread, after each call is done."""

    def __init__(self, most: int, woken: Callable[[], object] = bool) -> None:
        self.underway = 0
        self._most, self._woken = max(1, min(most, MOST)), woken
        self._lanes: list[_Lane] = []
        self._lane_of: dict[str, int] = {}
        self._loads: Counter[int] = Counter()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._started = 0

    def start(self, key: str, call: Callable[[], Any], then: Callable[[Callable[[], Any]], Any]) -> None:
        """Do `call` in the lane of `key`. `then` is for whoever takes it: it is given what returns or raises."""
        if key not in self._lane_of:
            self._lane_of[key] = lane = self._least_loaded()
            self._loads[lane] += 1
        self.underway += 1
        self._started += 1
        self._lanes[self._lane_of[key]].put(_Call(self._started, key, call, then, self._done, self._woken))

    def release(self, key: str) -> None:
        """No more calls of `key` will come."""
        lane = self._lane_of.pop(key, None)
        if lane is not None:
            self._loads[lane] -= 1

    def take(self, first_seconds: float | None = 0.0, more_seconds: float = 0.0) -> list[Done]:
        """Calls that are done, in the order in which they were started, so that quick ones come in no other order than
        one after another. Waits `first_seconds` for the first (None: as long as one is underway) and `more_seconds`
        for each further one."""
        found: list[Done] = []
        while self.underway:
            seconds = more_seconds if found else first_seconds
            try:
                found.append(self._done.get(seconds != 0.0, seconds))
            except Empty:
                break
            self.underway -= 1
        return sorted(found, key=lambda done: done.number)

    def close(self) -> None:
        """Give the threads back, each behind the call that it is in; nothing waits for them but, a moment, a process's
        end."""
        for lane in self._lanes:
            lane.free()

    def _least_loaded(self) -> int:
        if len(self._lanes) < self._most and all(self._loads[i] for i in range(len(self._lanes))):
            try:
                lane = _free.pop()
            except IndexError:
                lane = _Lane(f"environments {len(self._lanes)}")
            self._lanes.append(lane)
            return len(self._lanes) - 1
        return min(range(len(self._lanes)), key=self._loads.__getitem__)
