"""Limits on calls outside of the main thread, where no signal is delivered, and what is kept out of a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from models import deadline
from models.deadline import DeadlinePassed, held, within
from models.lanes import Lanes, _end_all


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(20)


def looping() -> None:
    while True:
        try:
            while True:
                pass
        except Exception:  # a limit that such a handler catches would be none
            continue


def test_code_that_loops_is_ended_in_its_thread() -> None:
    ended = threading.Event()

    def loop() -> None:
        try:
            looping()
        finally:
            ended.set()

    def call() -> None:
        with pytest.raises(DeadlinePassed):
            within(0.1, loop)
        assert ended.wait(5)

    in_a_thread(call)


def test_a_call_that_blocks_is_left_behind_and_the_next_one_is_done() -> None:
    forever = threading.Lock()
    forever.acquire()

    def call() -> str:
        began = time.perf_counter()
        with pytest.raises(DeadlinePassed):
            within(0.1, forever.acquire)
        assert time.perf_counter() - began < 5
        return within(5.0, lambda: "goes on")

    assert in_a_thread(call) == "goes on"
    forever.release()


def test_a_thread_has_one_helper_which_ends_with_it() -> None:
    def call() -> set[threading.Thread]:
        return {within(5.0, threading.current_thread) for _ in range(3)}

    (helper,) = in_a_thread(call)
    assert helper is not threading.current_thread()
    helper.join(5)
    assert not helper.is_alive()


def test_what_a_call_raises_reaches_its_caller() -> None:
    def call() -> None:
        with pytest.raises(TimeoutError, match="its own"):  # not to be taken for a limit that has passed
            within(5.0, raising, TimeoutError("its own"))

    in_a_thread(call)


@pytest.mark.parametrize("somewhere", [in_a_thread, lambda call: call()], ids=["thread", "main"])
def test_a_limit_stands_still_while_it_is_held_and_goes_on_then(somewhere: Callable[[Callable[[], Any]], Any]) -> None:
    passed: list[float] = []

    def holding() -> None:
        with held():
            time.sleep(0.5)
        passed.append(time.perf_counter())
        looping()

    def call() -> None:
        began = time.perf_counter()
        with pytest.raises(DeadlinePassed):
            within(0.2, holding)
        assert time.perf_counter() - began >= 0.7
        assert len(passed) == 1, "what is held is not ended"
        with held():  # there is no limit here
            pass

    somewhere(call)


def raising(problem: BaseException) -> None:
    raise problem


def test_the_end_of_a_process_waits_a_moment_for_threads_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter's end meets in a thread that ends would abort the process, with torch loaded."""
    monkeypatch.setattr(deadline, "LAST_SECONDS", 20.0)
    _end_all()  # no threads that other tests have left behind
    monkeypatch.setattr(deadline, "_ending", set())
    lanes, threads = Lanes(2), set(threading.enumerate())
    for key in "ab":
        lanes.start(key, lambda: within(5.0, time.sleep, 0.1), bool)
    begun = set(threading.enumerate()) - threads
    lanes.close()
    _end_all()
    deadline._let_them_end()
    assert len(begun) >= 2
    assert not [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("environments")]


def test_the_end_of_a_process_waits_no_longer_for_a_thread_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "LAST_SECONDS", 0.1)
    lanes, forever = Lanes(1), threading.Event()
    lanes.start("a", lambda: forever.wait(60), bool)
    lanes.close()
    _end_all()
    began = time.perf_counter()
    deadline._let_them_end()
    assert time.perf_counter() - began < 10
    forever.set()
