"""Nights on which nothing ran are not made up for: the next start cancels what the schedules wanted meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType, WorkerStatus
from prefect.client.schemas.responses import SetStateStatus

from db.values.types import utc_now
from flows import deploy as deploy_file
from flows import one_at_a_time
from flows.deploy import OVERDUE, _let_go
from flows.one_at_a_time import deaths_before


class Server:
    """Stands for a Prefect server with a work pool, its workers, and runs that are overdue."""

    def __init__(self, runs: list[Any], *workers: WorkerStatus, status: Any = SetStateStatus.ACCEPT) -> None:
        self._runs, self._workers, self._status = runs, workers, status
        self.asked: list[Any] = []
        self.cancelled: list[Any] = []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_workers_for_work_pool(self, name: str) -> list[Any]:
        assert name == "trace"
        return [SimpleNamespace(status=status) for status in self._workers]

    def read_flow_runs(self, **given: Any) -> list[Any]:
        self.asked.append(given)
        return self._runs

    def set_flow_run_state(self, run: Any, state: Any) -> Any:
        assert state.type == StateType.CANCELLED
        assert "when it was due" in state.message
        self.cancelled.append(run)
        return SimpleNamespace(status=self._status)


def run(name: str, automatic: bool = True, count: int = 0) -> Any:
    return SimpleNamespace(id=name, auto_scheduled=automatic, run_count=count)


def told(monkeypatch: pytest.MonkeyPatch, server: Server) -> list[str]:
    monkeypatch.setattr(deploy_file, "get_client", lambda **given: server)
    return _let_go("trace")


def test_what_was_due_while_nobody_was_there_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person ordered waits, and so does a run that has begun and goes on."""
    server = Server([run("a"), run("mine", False), run("b"), run("goes on", count=1)], WorkerStatus.OFFLINE)
    assert told(monkeypatch, server) == ["2 missed runs of the schedules are not made up for"]
    assert server.cancelled == ["a", "b"]
    (asked,) = server.asked
    assert asked["work_pool_filter"].name.any_ == ["trace"]
    assert asked["flow_run_filter"].state.name.any_ == ["Scheduled", "Late"]
    before = asked["flow_run_filter"].expected_start_time.before_
    assert abs((utc_now() - before - OVERDUE).total_seconds()) < 60


@pytest.mark.parametrize(
    "server",
    [
        Server([]),
        Server([run("a")], WorkerStatus.OFFLINE, WorkerStatus.ONLINE),  # it waits for the worker's one place
        Server([run("a")], status=SetStateStatus.ABORT),  # somebody has just begun it
    ],
)
def test_nothing_is_said_of_what_waits_for_a_worker_or_has_just_begun(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    assert told(monkeypatch, server) == []


def test_a_run_that_was_cancelled_before_it_began_hides_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(kind: StateType, start: Any) -> Any:
        state = SimpleNamespace(type=kind, message="lost")
        return SimpleNamespace(id=kind.value, name="griffin", state=state, start_time=start)

    runs = [ended(StateType.CANCELLED, None), ended(StateType.CRASHED, utc_now())]
    monkeypatch.setattr(one_at_a_time, "deployment", SimpleNamespace(id="00000000-0000-0000-0000-000000000007"))
    monkeypatch.setattr(one_at_a_time, "get_client", lambda **given: Server(runs))
    assert deaths_before() == {"CRASHED": "griffin (lost)"}
    runs[0].start_time = utc_now()
    assert deaths_before() == {}, "it ran, and told of what was before it"
