"""What `trace-agent up` does about its services from one look to the next, before a supervisor that is made by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows import services as services_file
from flows.services import Services, follow


class Supervisor:
    """Services by name, with their states; what is started stays as it is."""

    def __init__(self, **states: str) -> None:
        self.states, self.started, self.looks = states, list[str](), 0

    def getProcessInfo(self, name: str) -> dict[str, Any]:
        state, again = self.states[name], self.looks // 10  # each dies now and then
        return {"name": name, "statename": state, "pid": 100 + again if state == "RUNNING" else 0}

    def getAllProcessInfo(self) -> list[dict[str, Any]]:
        return [self.getProcessInfo(name) for name in self.states]

    def startProcess(self, name: str, wait: bool) -> None:
        self.started.append(name)


def followed(monkeypatch: pytest.MonkeyPatch, supervisor: Supervisor, say: Callable[[str], object]) -> None:
    """Follow for 150 seconds by the clock of the services, a look every two of them; then Ctrl-C."""

    def sleep(seconds: float) -> None:
        supervisor.looks += 1
        if supervisor.looks > 75:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 2.0 * supervisor.looks)
    monkeypatch.setattr(services_file, "time", clock)
    monkeypatch.setattr(services_file, "status_of", lambda url: 200)
    names = dict.fromkeys(supervisor.states, "")
    made = SimpleNamespace(connection=lambda: supervisor, health=names, log=lambda name: f"{name}.log", socket="")
    follow(cast("Services", made), lambda: True, say)


def test_a_gateway_that_fails_at_every_start_is_tried_each_minute_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said, supervisor = list[str](), Supervisor(mlflow="RUNNING", gateway="FATAL")
    followed(monkeypatch, supervisor, said.append)
    assert supervisor.started == ["gateway"] * 2
    assert said.count("gateway failed at every start, and is tried again: its log is gateway.log") == 2


def test_a_gateway_that_waited_for_a_round_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(mlflow="RUNNING", gateway="STOPPED")
    followed(monkeypatch, supervisor, lambda said: None)
    assert set(supervisor.started) == {"gateway"}


def test_a_line_that_cannot_be_written_ends_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log on the disk that is full, for which the service that is told of has died."""
    tried = list[str]()

    def full(said: str) -> None:
        tried.append(said)
        raise OSError(28, "No space left on device")

    supervisor = Supervisor(mlflow="RUNNING", worker="FATAL", gateway="RUNNING")
    followed(monkeypatch, supervisor, full)
    assert supervisor.looks > 75, "it went on until it was stopped"
    assert any("died and runs as process" in said for said in tried)
    assert supervisor.started == ["worker"] * 2
