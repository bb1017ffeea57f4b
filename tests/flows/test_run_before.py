"""A scheduled run learns from Prefect how the one before it ended: who was killed, or never began, tells nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort

from flows import one_at_a_time
from flows.one_at_a_time import death_before

DEPLOYMENT = UUID(int=7)


class Server:
    """Stands for a Prefect server whose newest ended run of the deployment is `last`."""

    def __init__(self, last: Any) -> None:
        self._last = last

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_flow_runs(self, *, flow_run_filter: Any, sort: FlowRunSort, limit: int) -> list[Any]:
        assert flow_run_filter.deployment_id.any_ == [DEPLOYMENT]
        assert StateType.RUNNING not in flow_run_filter.state.type.any_, "this run is not the one before it"
        assert (sort, limit) == (FlowRunSort.END_TIME_DESC, 1)
        if isinstance(self._last, Exception):
            raise self._last
        return [self._last] if self._last else []


def ended(kind: StateType, message: str | None = None) -> Any:
    return SimpleNamespace(name="green-griffin", state=SimpleNamespace(type=kind, message=message))


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (ended(StateType.CRASHED, "no heartbeat for 75 s"), "green-griffin (no heartbeat for 75 s)"),
        (ended(StateType.CRASHED), "green-griffin (no word of why)"),
        (ended(StateType.FAILED, "the store is down"), ""),
        (ended(StateType.COMPLETED), ""),
        (None, ""),
        (ConnectionError("refused"), ""),
    ],
)
def test_how_the_run_before_died(monkeypatch: pytest.MonkeyPatch, last: Any, said: str) -> None:
    monkeypatch.setattr(one_at_a_time, "deployment", SimpleNamespace(id=str(DEPLOYMENT)))
    monkeypatch.setattr(one_at_a_time, "get_client", lambda **given: Server(last))
    assert death_before() == said


def test_by_hand_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_at_a_time, "get_client", lambda **given: pytest.fail("asked"))
    assert death_before() == ""
