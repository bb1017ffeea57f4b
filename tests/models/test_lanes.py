"""Threads of environments: who gets one, who keeps his own, and what a free one holds."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

from models.lanes import Lanes


class Environment:
    """What a call into an environment holds."""


def done(lanes: Lanes, call: Callable[[], Any]) -> Any:
    """What a call returned that was started as the only one of a key of its own."""
    lanes.start("key", call, bool)
    (found,) = lanes.take(None)
    lanes.release("key")
    return found.result()


def at_work() -> threading.Thread:
    """The thread of a play that is over; it is free when this returns."""
    lanes = Lanes(1)
    thread: threading.Thread = done(lanes, threading.current_thread)
    freed = threading.Event()
    lanes.close()
    lanes._lanes[0]._calls.put(freed.set)
    assert freed.wait(20)
    return thread


def test_the_next_play_has_the_threads_of_the_last_one() -> None:
    thread = at_work()
    lanes = Lanes(1)
    assert done(lanes, threading.current_thread) is thread
    other = Lanes(1)
    assert done(other, threading.current_thread) is not thread, "one thread is of one play at a time"
    lanes.close()
    other.close()


def test_a_thread_that_does_not_come_back_is_given_to_nobody() -> None:
    forever, lanes = threading.Event(), Lanes(1)
    threads: list[threading.Thread] = []

    def hangs() -> None:
        threads.append(threading.current_thread())
        forever.wait(60)

    lanes.start("key", hangs, bool)
    lanes.close()
    following = Lanes(1)
    try:
        assert done(following, threading.current_thread) not in threads
    finally:
        forever.set()
        following.close()


def test_a_free_thread_holds_nothing_of_what_it_did() -> None:
    environment = Environment()
    held = weakref.ref(environment)
    lanes = Lanes(1)
    assert done(lanes, lambda of=environment: of is not None)
    del environment
    done(lanes, bool)
    gc.collect()
    assert held() is None
    lanes.close()
