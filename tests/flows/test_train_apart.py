"""A training in another process: ended when it takes too long, gone on with once, and its errors are the stage's."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from errors import LimitReached, TrainingError, TrainingStuck
from flows import train_apart as apart
from flows.train_apart import train_apart
from settings import load_settings
from tasks.round.context import Context
from tasks.round.results import TrainResult
from tasks.round.stage import open_context

RESULT = TrainResult(adapter="a", sha256="0", steps=1, run="r", ending="steps", chosen=1, verdict="")


def context(folder: Path, seconds: float = 60.0, done: Any = None) -> Any:
    settings = load_settings(home=folder, gateway_keys="k" * 24, limits={"training_minutes": seconds / 60})
    return SimpleNamespace(settings=settings, round=SimpleNamespace(id="r"), found=lambda kind, name: done)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, sys, time\norder = json.loads(sys.stdin.readline())\n{code}")


def test_the_order_reaches_the_process_without_a_key(settings_folder: Path) -> None:
    said = settings_folder / "order.json"
    train_apart(context(settings_folder), "refund", command(f"open({str(said)!r}, 'w').write(json.dumps(order))"))
    order = json.loads(said.read_text())
    assert (order["round"], order["capability"]) == ("r", "refund")
    assert order["settings"]["limits"]["training_minutes"] == 1.0
    assert "gateway_keys" not in order["settings"]


def test_what_is_done_starts_no_process(settings_folder: Path) -> None:
    train_apart(context(settings_folder, done=RESULT), "refund", ("/no/such/program",))


def test_a_training_that_hangs_is_ended_twice_with_all_that_it_started(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "POLL_SECONDS", 0.02)
    pids = settings_folder / "pids"
    hang = command(
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}}\\n')\ntime.sleep(60)"
    )
    with pytest.raises(TrainingStuck, match="'refund' was ended 2 times after limits"):
        train_apart(context(settings_folder, seconds=0.5), "refund", hang)
    lines = pids.read_text().splitlines()
    assert len(lines) == 2
    for pid in map(int, " ".join(lines).split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("kind", [TrainingError, LimitReached])
def test_an_error_of_the_stage_comes_back_as_what_it_is(settings_folder: Path, kind: type[Exception]) -> None:
    said = json.dumps({"error": kind.__name__, "message": "no group"})
    with pytest.raises(kind, match="no group"):
        train_apart(context(settings_folder), "refund", command(f"print({said!r}); sys.exit(1)"))


@pytest.mark.parametrize("code", ["sys.exit(3)", "print('Traceback'); sys.exit(3)", "print('{}'); sys.exit(3)"])
def test_any_other_death_is_said_with_its_status(settings_folder: Path, code: str) -> None:
    with pytest.raises(RuntimeError, match="'refund' ended with status 3"):
        train_apart(context(settings_folder), "refund", command(code))


@pytest.mark.parametrize("problem", [None, TrainingError("no group")])
def test_the_other_process_does_the_stage_of_that_round(
    settings_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: Exception | None,
) -> None:
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home", seed=5))
    order = {"settings": apart._settings_of(opened), "round": opened.round.id, "capability": "refund"}
    done: list[tuple[Context, str]] = []

    def do(given: Context, capability: str) -> None:
        done.append((given, capability))
        if problem:
            raise problem

    monkeypatch.setattr(apart.train, "do", do)
    monkeypatch.setattr(apart, "end_with_parent", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order) + "\n"))
    assert apart.main() == (1 if problem else 0)
    ((given, capability),) = done
    assert (given.round, given.settings, capability) == (opened.round, opened.settings, "refund")
    said = capsys.readouterr().out
    assert said == ('{"error": "TrainingError", "message": "no group"}\n' if problem else "")
