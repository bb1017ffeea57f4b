"""Deadlines: what else the machine does is no fault of a module's; what it takes of the processor, or waits, is."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from environments.sandbox import workers
from environments.sandbox.allowance import Allowance, TimeLimit
from environments.sandbox.pool import WorkerPool
from environments.sandbox.workers import CallKilled, ModuleError, SandboxLevel, SandboxLimits, Worker, WorkerDied

LIMITS = SandboxLimits(call_seconds=0.2, clock_seconds=60.0)
MODULE = """
import time
def work(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return "done"
def sleep():
    time.sleep(3600)
def fail(seconds):
    work(seconds)
    raise ValueError("no")
"""
LYING = """
from itertools import count
later = count(0, 1000)
time.process_time = lambda: next(later)
def nothing(): pass
"""
LEVELS = [SandboxLevel.PROCESS, SandboxLevel.BUBBLEWRAP]


@contextmanager
def stopped(pid: int, seconds: float) -> Iterator[None]:
    """As on a machine whose processors are busy: the process is given no time, for so long."""
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(seconds, go_on)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_that_other_load_slows_is_not_killed(level: SandboxLevel) -> None:
    worker, began = Worker(MODULE, level, LIMITS), time.monotonic()
    assert worker.module_pid is not None
    with stopped(worker.module_pid, 0.5):
        assert worker.call("work", [0.05]) == "done"
    assert time.monotonic() - began > 2 * LIMITS.call_seconds
    assert 0.05 <= worker.used < 0.2
    worker.kill()


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_that_takes_the_processor_for_too_long_is_killed_and_says_so(level: SandboxLevel) -> None:
    worker = Worker(MODULE, level, LIMITS)
    said = (
        r"deadline of 0\.2 s of processor time \(used: 0\.\d\d of 0\.2 s of processor time, .* of 60 s on the clock\)"
    )
    with pytest.raises(CallKilled, match=said) as found:
        worker.call("work", [60])
    assert found.value.plain == "the call passed its deadline of 0.2 s of processor time"
    assert worker.used >= 0.2
    assert not worker.alive


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_that_sleeps_is_killed_by_the_clock_and_says_so(level: SandboxLevel) -> None:
    worker = Worker(MODULE, level, SandboxLimits(call_seconds=0.2, clock_seconds=0.3))
    said = r"deadline of 0\.3 s on the clock \(used: 0\.0\d of 0\.2 s of processor time, 0\.3\d? of 0\.3 s on the clock"
    with pytest.raises(CallKilled, match=said):
        worker.call("sleep")


def test_loading_has_the_same_limits() -> None:
    with pytest.raises(WorkerDied, match=r"0\.2 s of processor time \("):
        Worker("while True: pass", SandboxLevel.BUBBLEWRAP, LIMITS)


def test_a_pool_counts_what_all_of_its_workers_have_taken() -> None:
    with closing(WorkerPool(MODULE, SandboxLevel.BUBBLEWRAP, LIMITS)) as pool:
        pool.call("work", [0.05])
        with pytest.raises(CallKilled):
            pool.call("work", [60])
        with pytest.raises(ModuleError, match="no"):
            pool.call("fail", [0.05])
        assert 0.3 <= pool.used < 0.6
        before = pool.used
        time.sleep(0.05)
        pool.close()
        assert pool.used == before


def test_without_a_clock_of_the_process_calls_are_judged_by_the_time_that_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(pid: int) -> float:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(workers, "processor_seconds", none)
    with caplog.at_level(logging.WARNING):
        worker = Worker(MODULE, SandboxLevel.BUBBLEWRAP, SandboxLimits(call_seconds=0.5))
    assert "cannot be read here" in caplog.text
    worker.call("work", [0.01])
    assert 0.01 <= worker.used < 0.1, "as the worker tells"
    with pytest.raises(CallKilled, match=r"deadline of 0\.5 s on the clock"):
        worker.call("sleep")


def test_what_measures_may_end_before_the_code_does() -> None:
    given: list[Any] = [1.0, 1.5, OSError("no such process"), 7.0]

    def used() -> float:
        now = given.pop(0)
        if isinstance(now, OSError):
            raise now
        return float(now)

    allowed = Allowance(TimeLimit(3.0, 60.0), used)
    assert [allowed.used, allowed.used, allowed.over()] == [0.5, 0.5, "3 s of processor time"]


DOCKER = """#!{python} -I
import os, sys
if sys.argv[1] == "run":
    os.execv({python!r}, [{python!r}, *sys.argv[sys.argv.index("some-image") + 1 :]])
"""


def test_a_container_has_a_timer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes may be another machine's. The worker tells what it took, and is not believed to have taken more
    than has passed."""
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(python=sys.executable))
    docker.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRACE_SANDBOX_IMAGE", "some-image")
    worker = Worker(MODULE, SandboxLevel.CONTAINER, LIMITS)
    assert worker.module_pid is None
    assert [worker.call("work", [0.1]) for _ in range(3)] == ["done"] * 3  # each has the whole of it
    assert 0.3 <= worker.used < 1.0
    with pytest.raises(CallKilled, match=r"deadline of 0\.2 s of processor time \("):
        worker.call("work", [60])
    worker = Worker(MODULE, SandboxLevel.CONTAINER, SandboxLimits(call_seconds=0.2, clock_seconds=0.3))
    with pytest.raises(CallKilled, match=r"deadline of 0\.3 s on the clock"):
        worker.call("sleep")
    worker, began = Worker(MODULE + LYING, SandboxLevel.CONTAINER, LIMITS), time.monotonic()
    worker.call("nothing")
    assert 0 < worker.used <= time.monotonic() - began + 1
    worker.kill()
