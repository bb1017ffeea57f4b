"""Processes side by side: each on a place of its own, one that fails stops no other, and its error is raised here."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from errors import ConfigurationError, ProviderError, StoreError
from tasks.operations import devices, jobs
from tasks.operations.devices import check_at_once, parts_of_machine
from tasks.operations.jobs import Stopped, raise_failure, run_at_once, run_job, say_failure


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


FAILS = """
from errors import {kind}
from tasks.operations.jobs import say_failure
say_failure({kind}("{said}"))
raise SystemExit(1)
"""


def test_every_job_has_a_place_of_its_own_and_no_more_run_than_there_are_places(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, time
place = pathlib.Path({str(tmp_path)!r}, os.environ["PLACE"])
place.mkdir()          # fails where another is there at the same time
time.sleep(0.1)
place.rmdir()
pathlib.Path({str(tmp_path)!r}, "done-" + os.environ["PLACE"]).open("a").write("x")
"""
    run_at_once({f"seed {i}": command(code) for i in range(6)}, [{"PLACE": "a"}, {"PLACE": "b"}])
    assert sum(len((tmp_path / f"done-{place}").read_text()) for place in "ab") == 6


def test_one_that_fails_stops_no_other_and_the_first_error_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = command(FAILS.format(kind="StoreError", said="the disk is full"))
    also = command(FAILS.format(kind="ConfigurationError", said="no such seed"))
    after = command(f"open({str(tmp_path / 'after')!r}, 'w')")
    with pytest.raises(StoreError, match="the disk is full"):
        run_at_once({"seed 1": told, "seed 2": also, "seed 3": after}, [{}])
    assert (tmp_path / "after").exists()
    assert "seed 2 failed, too: ConfigurationError: no such seed" in caplog.text
    with pytest.raises(RuntimeError, match="the process of seed 4 ended with status 3; its log says why"):
        run_at_once({"seed 4": command("raise SystemExit(3)")}, [{}])


def test_what_comes_after_others_waits_for_them_and_is_not_run_where_one_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def written(name: str, needs: str = "", wait: float = 0.0) -> tuple[str, ...]:
        there = f"assert pathlib.Path({str(tmp_path)!r}, {needs!r}).exists();" if needs else ""
        return command(
            f"import pathlib, time; time.sleep({wait}); {there} pathlib.Path({str(tmp_path)!r}, {name!r}).touch()"
        )

    fails = command(FAILS.format(kind="StoreError", said="the disk is full"))
    given = {
        "third": written("third", "second"), "second": written("second", "first"), "first": written("first", wait=0.3),
        "orphan": written("orphan"), "its": written("its"), "broken": fails,
    }  # fmt: skip
    after = {"third": ["second", "first"], "second": ["first"], "orphan": ["broken"], "its": ["orphan", "first"]}
    with pytest.raises(StoreError, match="the disk is full"):
        run_at_once(given, [{}, {}], after)
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "third"}
    assert "orphan is not run: it follows broken, which failed" in caplog.text
    assert "its is not run: it follows orphan, which failed" in caplog.text


def test_a_job_ends_with_what_ordered_it() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped, match="ended with what ordered it"):
        run_job(command("import time; time.sleep(60)"), float("inf"), {}, stop)
    assert time.monotonic() - began < 20
    assert not [p for p in psutil.Process().children() if "sleep(60)" in " ".join(p.cmdline())]
    with pytest.raises(Stopped):
        run_job(command("raise SystemExit"), float("inf"), {}, stop)


def test_places_are_equal_parts_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert parts_of_machine(1) == [{}]
    assert parts_of_machine(4) == [{"OMP_NUM_THREADS": "2"}] * 4
    monkeypatch.setattr("models.local.base.cores_here", lambda: 3)
    check_at_once(1)
    check_at_once(3)
    with pytest.raises(ConfigurationError, match="--at-once 4 needs a core for every process, and this one may use 3"):
        check_at_once(4)
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["0", "1", "2", "3"])
    assert parts_of_machine(2) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    check_at_once(4)
    with pytest.raises(ConfigurationError, match="--at-once 3 cannot share 4 visible GPUs evenly; give a divisor of 4"):
        check_at_once(3)


def test_a_job_may_print_more_than_a_pipe_holds() -> None:
    done = run_job(command("print('x' * 300_000)"), 60, {}, threading.Event())
    assert done == (0, "x" * 300_000 + "\n")


@pytest.mark.parametrize("flags", [{"transient": True}, {"unpaid": True}, {}], ids=str)
def test_what_an_error_says_of_itself_comes_out_of_a_job_with_it(
    flags: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """A provider that waits to be paid interrupts a round; without that word it would close it as failed."""
    say_failure(ProviderError("gpt-4.1 wants to be paid", **flags))
    with pytest.raises(ProviderError, match="wants to be paid") as raised:
        raise_failure((1, capsys.readouterr().out), "the training")
    assert {flag: getattr(raised.value, flag) for flag in ("transient", "unpaid")} == (
        {"transient": False, "unpaid": False} | flags
    )
    assert not raised.value.lasting
