"""A run that hangs ends itself and says where it stood; one that moves, or waits for a person, does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tasks.unattended import stalls
from tasks.unattended.stalls import hung_before, pulse, unwatched, watched

ROOT = Path(__file__).parents[3]
HANGS = """
import pathlib, sys, threading
from tasks.unattended.stalls import hung_before, watched
folder = pathlib.Path(sys.argv[1])
def waits_for_ever(): threading.Event().wait()
with watched(0.4 / 60, folder):
    print(hung_before(folder), flush=True)
    waits_for_ever()
"""


class Interpreter:
    """The interpreter's watch (`faulthandler`: one at a time, the last that was armed) by a clock of the test's own: so
    a machine that is busy changes nothing. `ended`: it would have ended the process."""

    def __init__(self) -> None:
        self.now, self.ends, self.ended = 1000.0, float("inf"), False

    def monotonic(self) -> float:
        return self.now

    def dump_traceback_later(self, seconds: float, exit: bool, file: Any) -> None:
        assert exit
        assert not file.closed
        self.ends = self.now + seconds

    def cancel_dump_traceback_later(self) -> None:
        self.ends = float("inf")

    def pass_minutes(self, minutes: float) -> None:
        self.now += 60 * minutes
        self.ended |= self.now >= self.ends


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    made = Interpreter()
    monkeypatch.setattr(stalls, "faulthandler", made)
    monkeypatch.setattr(stalls, "time", made)
    return made


def test_a_run_that_hangs_ends_and_leaves_its_stacks(tmp_path: Path) -> None:
    """Also where it has looked for those of the run before: a round is watched by then."""
    command, told = [sys.executable, "-c", HANGS, str(tmp_path)], []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
        assert done.returncode == 1
        told.append(done.stdout.decode().strip())
    assert told[0] == "None"
    assert "waits_for_ever" in Path(told[1]).read_text()
    left = hung_before(tmp_path)
    assert left is not None
    assert left != Path(told[1])
    assert "waits_for_ever" in left.read_text()
    assert hung_before(tmp_path) is None, "it is told once"


def test_what_moves_is_left_alone_and_what_stands_still_is_not(tmp_path: Path, clock: Interpreter) -> None:
    with watched(60, tmp_path):
        for _ in range(5):
            clock.pass_minutes(59)
            pulse()
        assert not clock.ended
        clock.pass_minutes(60)
        assert clock.ended


def test_a_round_that_ends_with_an_error_leaves_no_file(tmp_path: Path, clock: Interpreter) -> None:
    with suppress(ValueError), watched(60, tmp_path):
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_pulses_that_come_often_count_too(tmp_path: Path, clock: Interpreter) -> None:
    """Not every one arms the watch: that costs a thread."""
    with watched(60, tmp_path):
        for _ in range(10_000):
            clock.pass_minutes(0.01)
            pulse()
        assert not clock.ended


def test_a_person_may_take_their_time(tmp_path: Path, clock: Interpreter) -> None:
    with watched(60, tmp_path):
        with unwatched():
            clock.pass_minutes(500)
            pulse()
            clock.pass_minutes(500)
        clock.pass_minutes(59)
        assert not clock.ended, "what comes after has the whole time again"
        clock.pass_minutes(1)
        assert clock.ended


def test_nothing_is_watched_afterwards(tmp_path: Path, clock: Interpreter) -> None:
    with watched(60, tmp_path):
        pass
    pulse()
    clock.pass_minutes(1000)
    assert not clock.ended
    assert list(tmp_path.iterdir()) == []


def test_no_minutes_are_no_limit(tmp_path: Path, clock: Interpreter) -> None:
    with watched(0, tmp_path):
        pulse()
        clock.pass_minutes(10_000)
    assert not clock.ended


def test_a_process_ends_with_the_one_that_ordered_it() -> None:
    """However that one went: its end of the pipe is closed by the kernel."""
    code = "import threading\nfrom models.deadline import *\nend_with_parent()\n"
    code += "print(0, flush=True)\nthreading.Event().wait()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    process.stdin.close()
    assert process.wait(30) < 0
    process.stdout.close()


def test_a_process_that_watches_leaves_others_their_files(tmp_path: Path, clock: Interpreter) -> None:
    with (tmp_path / f"hung.{socket.gethostname()}.{os.getppid()}.0a.txt").open("a", encoding="utf-8") as file:
        with watched(60, tmp_path):
            assert hung_before(tmp_path) is None
        assert hung_before(tmp_path) is None
        file.write("stacks")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["stacks"]


def test_what_a_killed_process_left_empty_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    (tmp_path / f"hung.{socket.gethostname()}.{ended.pid}.0a.txt").touch()
    (tmp_path / "hung.another-machine.1.0a.txt").touch()
    (tmp_path / "hung.txt").write_text("stacks that an earlier version left")
    left = hung_before(tmp_path)
    assert left is not None
    assert left.read_text() == "stacks that an earlier version left"
    assert {path.name for path in tmp_path.iterdir()} == {"hung.another-machine.1.0a.txt", left.name}
