"""Several capabilities trained at once: each a job on its share of the machine, all of them ended with the round."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prefect import flow

from errors import LimitReached, ProviderError, StoreError, TrainingError
from flows import train_apart as apart
from flows.train_apart import at_once, spec_of, train_together
from settings import load_settings
from tasks.operations import jobs
from tasks.round.results import TrainResult

pytestmark = pytest.mark.usefixtures("prefect")
# Longer than anything here takes: what is waited for without coming fails the test.
LONG = 60.0


class Begun:
    """Stands for an open round. `runs` counts how often its run in MLflow was looked for."""

    def __init__(self, folder: Path, trainings: int = 2) -> None:
        self.settings = load_settings(
            home=folder, selection={"most": 4}, devices={"trainings": trainings}, policy={"concurrency": 64}
        )
        self.round, self.budget, self.runs, self.rested = SimpleNamespace(id="r"), None, 0, 0

    @property
    def run(self) -> str:
        self.runs += 1
        return "run"

    def rest(self) -> None:
        self.rested += 1

    def found(self, kind: Any, capability: str) -> None:
        return None

    def result(self, kind: Any, capability: str) -> TrainResult:
        return TrainResult(adapter=capability, sha256="0", steps=1, run="r", ending="steps", chosen=1)


class Jobs:
    """Stands for `train_apart`: `do` says what becomes of a capability's. Keeps what was begun with which share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, do: Callable[[str], object]) -> None:
        self.do, self.begun, self.lock = do, list[tuple[str, str]](), threading.Lock()
        self.now = self.most = 0
        monkeypatch.setattr(apart, "train_apart", self)
        places = [{"CUDA_VISIBLE_DEVICES": name} for name in ("0,1", "2,3")]
        monkeypatch.setattr(apart, "shares", lambda settings: places)

    def __call__(self, context: Any, capability: str, share: dict[str, str], stop: threading.Event) -> None:
        with self.lock:
            self.begun.append((capability, share["CUDA_VISIBLE_DEVICES"]))
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self.do(capability)
        finally:
            with self.lock:
                self.now -= 1

    def names(self) -> list[str]:
        return [capability for capability, _ in self.begun]


def test_as_many_as_asked_for_are_trained_at_once_each_on_its_share(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four wait for each other; the place of the first that ends is the third's."""
    meet, context, rested = threading.Barrier(2), Begun(settings_folder), list[int]()

    def do(name: str) -> None:
        rested.append(context.rested)
        meet.wait(LONG)

    jobs = Jobs(monkeypatch, do)
    results = train_together(context, ["a", "b", "c", "d"])  # type: ignore[arg-type]
    assert [(name, result.adapter) for name, result in results.items()] == [(n, n) for n in "abcd"]
    assert jobs.most == 2
    for first in (0, 2):
        assert sorted(share for _, share in jobs.begun[first : first + 2]) == ["0,1", "2,3"]
    assert sorted(jobs.names()[:2]) == ["a", "b"]
    assert context.runs == 1, "begun before the jobs, each of which would begin one"
    assert rested == [1, 1, 1, 1], "this process has given its memory back before them"


def test_one_that_fails_stops_no_other_and_is_told_as_what_it_is(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def do(name: str) -> None:
        if name == "a":
            failed.set()
            raise TrainingError("no group of a")
        failed.wait(LONG)
        if name == "c":
            raise TrainingError("no group of c")

    jobs = Jobs(monkeypatch, do)
    with pytest.raises(TrainingError, match="no group of a"), caplog.at_level("ERROR", "trace"):
        train_together(Begun(settings_folder), ["a", "b", "c"])  # type: ignore[arg-type]
    assert sorted(jobs.names()) == ["a", "b", "c"], "and none was tried again"
    assert "the training of c failed, too: TrainingError: no group of c" in caplog.messages


def test_what_may_pass_is_tried_again(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(apart.RETRIES, "retry_delay_seconds", [0, 0])
    problems = [ProviderError("the server is away", transient=True)]

    def do(name: str) -> None:
        if name == "b" and problems:
            raise problems.pop()

    jobs = Jobs(monkeypatch, do)
    assert list(train_together(Begun(settings_folder), ["a", "b"])) == ["a", "b"]  # type: ignore[arg-type]
    assert sorted(jobs.names()) == ["a", "b", "b"]


def test_what_the_round_may_not_take_any_more_is_begun_by_none(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are under way look at the limits themselves."""
    meet = threading.Barrier(2)

    def do(name: str) -> None:
        meet.wait(LONG)
        raise LimitReached(f"hours, says {name}")

    jobs = Jobs(monkeypatch, do)
    with pytest.raises(LimitReached, match="says a"):
        train_together(Begun(settings_folder), ["a", "b", "c", "d"])  # type: ignore[arg-type]
    assert sorted(jobs.names()) == ["a", "b"]


def test_each_is_a_named_run_under_the_flow_s(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.client.orchestration import get_client
    from prefect.context import get_run_context

    Jobs(monkeypatch, lambda name: None)

    @flow
    def night() -> str:
        train_together(Begun(settings_folder), ["refund", "address"])  # type: ignore[arg-type]
        return str(get_run_context().flow_run.id)  # type: ignore[union-attr]

    ran = night()
    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_task_runs() if str(run.flow_run_id) == ran]
    assert sorted((run.name, run.state_name) for run in runs) == [
        ("train address", "Completed"),
        ("train refund", "Completed"),
    ]


HANG = """
import json, os, subprocess, sys, time
spec = json.load(open(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"])
place = os.path.join(os.environ["PIDS"], spec["order"]["capability"])
open(place + ".part", "w").write(json.dumps([os.getpid(), child.pid, os.environ["OMP_NUM_THREADS"]]))
os.rename(place + ".part", place)
time.sleep(600)
"""


def test_a_round_that_is_stopped_ends_all_its_trainings(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker stops a flow: two real processes, each with a child of its own, and one that waits."""
    pids = settings_folder / "pids"
    pids.mkdir()
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(apart, "command_of", lambda processes: (sys.executable, "-c", HANG))
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)

    def stop() -> None:
        while len([p for p in pids.iterdir() if not p.suffix]) < 2:
            if over.wait(0.02):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    def end(number: int, frame: object) -> None:  # Prefect's engine, which a worker starts, does the like
        raise SystemExit

    before = signal.signal(signal.SIGTERM, end)
    over = threading.Event()
    watching = threading.Thread(target=stop, daemon=True)

    @flow
    def night() -> None:
        watching.start()
        train_together(Begun(settings_folder), ["a", "b", "c"])  # type: ignore[arg-type]

    try:
        with pytest.raises(SystemExit):
            night()
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)
    told = {p.name: json.loads(p.read_text()) for p in pids.iterdir()}
    assert sorted(told) == ["a", "b"]
    assert [threads for *_, threads in told.values()] == ["3", "3"], "of six"
    processes = [psutil.Process(pid) for *both, _ in told.values() for pid in both if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(processes, timeout=10)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


def test_trainings_at_once_share_the_turns_in_flight(settings_folder: Path) -> None:
    for trainings, share in ((1, 64), (3, 21), (4, 16)):
        settings = Begun(settings_folder, trainings)
        assert spec_of(settings, "a")["order"]["settings"]["policy"]["concurrency"] == share  # type: ignore[arg-type]


def test_where_methods_compete_trainings_come_one_after_another(settings_folder: Path) -> None:
    context: Any = Begun(settings_folder)
    assert at_once(context) == 2
    context.budget = object()
    assert at_once(context) == 1


def test_mlflow_that_is_away_is_met_before_any_training(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException

    def away(self: Begun) -> str:
        raise MlflowException("no such host")

    jobs = Jobs(monkeypatch, lambda name: None)
    monkeypatch.setattr(Begun, "run", property(away))
    with pytest.raises(StoreError, match=r"MLflow at .* failed while trainings were begun: .* no such host"):
        train_together(Begun(settings_folder), ["a", "b"])  # type: ignore[arg-type]
    assert jobs.begun == []
