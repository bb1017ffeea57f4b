"""Nights on which nothing ran are not made up for: the next start cancels what the schedules wanted meanwhile."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.schemas.objects import StateType, WorkerStatus
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Cancelled

from db.values.types import utc_now
from flows import deploy as deploy_file
from flows import improve
from flows.deploy import OVERDUE, _let_go
from flows.runs import missed, one_at_a_time
from flows.runs.one_at_a_time import deaths_before


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

    def read_flow_runs(self, *, limit: int, offset: int = 0, **given: Any) -> list[Any]:
        self.asked.append(given)
        return self._runs[offset : offset + limit]

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
    asked = server.asked[0]
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


DEPLOYED = UUID(int=7)
HOUR = timedelta(hours=1)


class Queue:
    """Stands for a server with the runs of one deployment, of which `mine` is this process's."""

    def __init__(self, mine: Any, *runs: Any) -> None:
        self._mine, self._runs = mine, list(runs)
        self.cancelled: list[tuple[str, str]] = []

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_flow_run(self, given: UUID) -> Any:
        return self._mine

    def read_flow_runs(self, *, flow_run_filter: Any, sort: Any, limit: int) -> list[Any]:
        assert flow_run_filter.deployment_id.any_ == [DEPLOYED]
        assert flow_run_filter.state.name.any_ == ["Scheduled", "Late"]
        asked = flow_run_filter.expected_start_time
        assert abs((utc_now() - asked.before_).total_seconds()) < 60
        return [r for r in self._runs if asked.after_ <= r.expected_start_time <= asked.before_]

    def set_flow_run_state(self, run: Any, state: Any) -> Any:
        self.cancelled.append((run, state.message))
        return SimpleNamespace(status=SetStateStatus.ACCEPT)


def due(name: str, hours_ago: float, automatic: bool = True, count: int = 0, target: str = "shop") -> Any:
    when = utc_now() - hours_ago * HOUR
    wanted = {"params": {"target": target}}
    return SimpleNamespace(
        id=name, expected_start_time=when, auto_scheduled=automatic, run_count=count, parameters=wanted
    )


def way(monkeypatch: pytest.MonkeyPatch, server: Any) -> Any:
    monkeypatch.setattr(missed, "deployment", SimpleNamespace(id=str(DEPLOYED)))
    monkeypatch.setattr(missed, "flow_run", SimpleNamespace(id=str(UUID(int=1))))
    monkeypatch.setattr(missed, "get_client", lambda **given: server)
    return missed.makes_way()


def test_of_the_nights_that_a_worker_missed_the_newest_is_played(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine, newest = due("mine", 73, count=1), due("newest", 1)
    others = [due("by hand", 60, False), due("goes on", 30, count=1), due("other", 20, target="tau2:retail")]
    server = Queue(mine, due("b", 49), *others, due("c", 25), newest, due("tomorrow", -23))
    ended = way(monkeypatch, server)
    assert ended.type == StateType.CANCELLED
    assert [name for name, _ in server.cancelled] == ["b", "c"]
    for run, said in zip((mine, *server._runs[:1]), (ended.message, server.cancelled[0][1]), strict=True):
        assert said == (
            f"the run of {run.expected_start_time:%Y-%m-%d %H:%M} UTC is not made up for: nobody was there to do it, "
            f"and that of {newest.expected_start_time:%Y-%m-%d %H:%M} UTC is due"
        )
        assert said in caplog.text


@pytest.mark.parametrize(
    "server",
    [
        Queue(due("mine", 1, count=1), due("before", 25), due("tomorrow", -23)),  # the newest that is due
        Queue(due("mine", 49, False, 1), due("b", 25)),  # a person ordered it
        Queue(due("mine", 49, count=2), due("b", 25)),  # it goes on
        Queue(due("mine", 49, count=1), due("b", 25, target="tau2:retail")),  # another schedule of the deployment
        ConnectionError("refused"),
    ],
)
def test_a_run_with_nothing_later_to_play_is_played(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    assert way(monkeypatch, server) is None
    assert getattr(server, "cancelled", []) == []


def test_why_a_server_does_not_say_what_is_due_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = httpx.Request("GET", "http://trace:sesame@127.0.0.1:4200/api/flow_runs/1")
    server = Queue(None)
    monkeypatch.setattr(server, "read_flow_run", lambda run: httpx.Response(500, request=asked).raise_for_status())
    assert way(monkeypatch, server) is None
    assert "whether later runs are due (HTTPStatusError: " in caplog.text
    assert "http://127.0.0.1:4200/api/flow_runs/1" in caplog.text
    assert "sesame" not in caplog.text


@pytest.mark.integration
def test_a_round_that_makes_way_plays_nothing(prefect: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Cancelled(message="not made up for")
    monkeypatch.setattr(improve, "makes_way", lambda: said)
    monkeypatch.setattr(improve, "preflight", lambda settings: pytest.fail("it begins"))
    assert improve.improve.fn() is said
    monkeypatch.setattr(missed, "get_client", lambda **given: pytest.fail("asked"))
    assert missed.makes_way() is None, "by hand nobody is asked"
