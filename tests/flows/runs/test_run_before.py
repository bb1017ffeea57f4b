"""A scheduled run learns from Prefect how the one before it ended: who was killed, or never began, tells nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort

from flows.runs import one_at_a_time
from flows.runs.one_at_a_time import deaths_before

DEPLOYMENT = UUID(int=7)


class Server:
    """Stands for a Prefect server with the ended runs of the deployment, the newest first, or one that fails."""

    def __init__(self, runs: list[Any] | Exception) -> None:
        self._runs = runs

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_flow_runs(self, *, flow_run_filter: Any, sort: FlowRunSort, limit: int) -> list[Any]:
        assert flow_run_filter.deployment_id.any_ == [DEPLOYMENT]
        assert StateType.RUNNING not in flow_run_filter.state.type.any_, "this run is not the one before it"
        assert (sort, limit) == (FlowRunSort.END_TIME_DESC, one_at_a_time.MOST_DEATHS)
        if isinstance(self._runs, Exception):
            raise self._runs
        return self._runs


def ended(kind: StateType, message: str | None = None, number: int = 1, **params: Any) -> Any:
    name, state = f"griffin-{number}", SimpleNamespace(type=kind, message=message)
    return SimpleNamespace(id=UUID(int=number), name=name, state=state, parameters={"params": params})


CRASHED, SILENT = StateType.CRASHED, "no heartbeat for 75 s"


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([ended(CRASHED, SILENT)], {1: f"griffin-1 ({SILENT})"}),
        ([ended(CRASHED)], {1: "griffin-1 (no word of why)"}),
        # The newest died before it could tell of the one before it; what lies behind a run that ended was told by it.
        (
            [ended(CRASHED, None, 4), ended(CRASHED, SILENT, 3), ended(StateType.COMPLETED, None, 2), ended(CRASHED)],
            {3: f"griffin-3 ({SILENT})", 4: "griffin-4 (no word of why)"},
        ),
        ([ended(StateType.FAILED, "the store is down"), ended(CRASHED)], {}),
        ([ended(StateType.COMPLETED)], {}),
        ([], {}),
        (ConnectionError("refused"), {}),
    ],
)
def test_how_the_runs_before_died(monkeypatch: pytest.MonkeyPatch, runs: Any, said: dict[int, str]) -> None:
    monkeypatch.setattr(one_at_a_time, "deployment", SimpleNamespace(id=str(DEPLOYMENT)))
    monkeypatch.setattr(one_at_a_time, "get_client", lambda **given: Server(runs))
    found = deaths_before()
    assert found == {str(UUID(int=number)): text for number, text in said.items()}
    assert list(found.values()) == list(said.values()), "oldest first"


@pytest.mark.parametrize(("target", "died"), [("shop", [1, 4]), ("bfcl:single", [2]), ("tau2:retail", []), ("", [4])])
def test_who_died_on_another_target_is_told_there(
    monkeypatch: pytest.MonkeyPatch, settings_folder: Path, target: str, died: list[int]
) -> None:
    """Schedules of two targets on one deployment: a night of the one is not the run before that of the other."""
    runs = [
        ended(CRASHED, None, 4),  # the settings' target, which is the shop
        ended(StateType.COMPLETED, None, 3, target="tau2:retail"),
        ended(CRASHED, None, 2, target="bfcl:single"),
        ended(CRASHED, None, 1, target="shop"),
    ]
    monkeypatch.setattr(one_at_a_time, "deployment", SimpleNamespace(id=str(DEPLOYMENT)))
    monkeypatch.setattr(one_at_a_time, "get_client", lambda **given: Server(runs))
    assert list(deaths_before(target)) == [str(UUID(int=number)) for number in died]


def test_by_hand_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_at_a_time, "get_client", lambda **given: pytest.fail("asked"))
    assert deaths_before() == {}
