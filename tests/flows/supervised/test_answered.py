"""Which service hangs: one that has answered and does so no more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flows import services as services_file
from flows.services import Answered


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which services are given up, instead of those that pass."""
    now = [0.0]
    monkeypatch.setattr(services_file, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(
    ("prefect", "worker", "hung"),
    [
        (200, 200, []),
        (200, 503, ["worker"]),  # its process lives, and asks for no work
        (503, 503, []),  # the server is not well: the worker waits for it
        (0, 503, ["prefect"]),
        (500, 0, ["worker"]),
    ],
)
def test_a_worker_that_asks_for_no_work_hangs_unless_it_is_the_servers_doing(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], prefect: int, worker: int, hung: list[str]
) -> None:
    answer = {"prefect": 200, "worker": 200}
    monkeypatch.setattr(services_file, "status_of", lambda name: answer[name])
    asked, alive = Answered({name: name for name in answer}), {"prefect": 1, "worker": 2}
    assert asked.hung(alive) == []
    answer.update(prefect=prefect, worker=worker)
    for clock[0] in (100.0, 299.0):
        assert asked.hung(alive) == []
    clock[0] = 315.0
    assert asked.hung(alive) == hung


def test_what_only_starts_is_let_and_none_is_asked_all_the_time(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    questions: list[str] = []
    status = 200

    def answer(name: str) -> int:
        questions.append(name)
        return status

    monkeypatch.setattr(services_file, "status_of", answer)
    asked = Answered({"mlflow": "mlflow", "gateway": "gateway"})
    for clock[0] in (0.0, 5.0, 10.0):
        assert asked.hung({"mlflow": 1, "gateway": 0}) == []
    assert questions == ["mlflow"]
    status = 0
    for clock[0] in (200.0, 400.0, 900.0):  # another process, which loads
        assert asked.hung({"mlflow": 2, "gateway": 0}) == []
