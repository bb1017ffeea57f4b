"""Progress says how many are done, how fast, and how long it will take, on a terminal and in a log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tasks.unattended import progress
from tasks.unattended.progress import Meter, pace


def test_lines_say_rate_and_time_left(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, *(10.0 * k for k in range(1, 20) for _ in range(2))])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with caplog.at_level(logging.INFO, logger="trace"), Meter("rollout", 4, "episodes") as meter:
        for _ in range(4):
            meter.advance()
    assert caplog.messages, "a log gets a line every 15 seconds"
    assert all(line.startswith("rollout: ") and line.endswith("s left") for line in caplog.messages)


def test_a_resumed_count_does_not_flatter_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trace"), Meter("train", 5, "steps", done=3) as meter:
        meter._began -= 10.0  # as if the first step had taken ten seconds
        meter.advance("success 50 %", say=True)
    assert meter.rate == pytest.approx(0.1, rel=0.01)
    assert caplog.messages == ["train: 4 of 5 steps, 10 s each, 10 s left; success 50 %"]


def test_of_many_at_once_the_first_says_nothing_of_the_pace(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trace"), Meter("play", 4, "episodes", at_once=2) as meter:
        meter._began -= 40.0
        meter._said -= 40.0  # nothing was said for as long
        meter.beat("7 steps")
        meter.beat("8 steps")
        meter.advance(say=True)
        meter.advance("20 steps", say=True)
    assert caplog.messages == [
        "play: 0 of 4 episodes; 7 steps",
        "play: 1 of 4 episodes",
        "play: 2 of 4 episodes, 20 s each, 40 s left; 20 steps",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Meter("train", 2, "steps") as meter:
        meter.advance("success 50 %")
        meter._bar.progress.refresh()  # type: ignore[union-attr]
    assert "1/2" in terminal.getvalue()
    assert "success 50 %" in terminal.getvalue()


def test_a_terminal_that_is_shared_gets_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Meter, "bars", False)
    with caplog.at_level("INFO", "trace"), Meter("train refund", 2, "steps") as meter:
        meter.advance("success 50 %", say=True)
    assert caplog.messages[0].startswith("train refund: 1 of 2 steps")


def test_pace_reads_well() -> None:
    assert pace(2.44, "episodes") == "2.4 episodes/s"
    assert pace(1 / 31, "steps") == "31 s each"
