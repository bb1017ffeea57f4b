"""A slot that outlived its run (a restarted server had the lease in memory) does not end all later nights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.states import Completed, Running

from errors import TargetBusy
from flows.runs import one_at_a_time
from flows.runs.one_at_a_time import alone_on, limit_name

NAME = limit_name("left over")


@pytest.fixture
def client(prefect: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    """A real server, on which the target's slot is taken and no lease says by whom."""
    monkeypatch.setattr(one_at_a_time, "SECONDS", 2.0)
    with get_client(sync_client=True) as found:
        found.upsert_global_concurrency_limit_by_name(NAME, 1)
        found.update_global_concurrency_limit(NAME, GlobalConcurrencyLimitUpdate(active_slots=1))
        yield found
        for run in found.read_flow_runs():
            found.set_flow_run_state(run.id, Completed(), force=True)


def running(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, **params: str) -> Any:
    """A run of a deployment, under way with these `params`; and this process is another."""
    flow = client.create_flow_from_name("left-over")
    deployed = client.create_deployment(flow_id=flow, name="left-over")
    monkeypatch.setattr(one_at_a_time, "deployment", SimpleNamespace(id=str(deployed)))
    given = {"params": params}
    other, mine = (client.create_flow_run_from_deployment(deployed, parameters=given, state=Running()) for _ in "12")
    monkeypatch.setattr(one_at_a_time, "flow_run", SimpleNamespace(id=str(mine.id)))
    return other.id


def taken(client: SyncPrefectClient) -> int:
    return client.read_global_concurrency_limit_by_name(NAME).active_slots


def test_it_is_given_back_where_no_other_run_is_under_way(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other: UUID = running(client, monkeypatch)
    with pytest.raises(TargetBusy, match="another run works on left over"), alone_on("left over"):
        pytest.fail("two at once")
    assert taken(client) == 1
    client.set_flow_run_state(other, Completed(), force=True)
    with caplog.at_level(logging.WARNING, "trace"), alone_on("left over"):
        assert taken(client) == 1, "it is ours now"
    assert f"limit {NAME!r} is taken and no other run is under way" in caplog.text
    assert taken(client) == 0


def test_a_run_on_another_target_holds_none(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one target is at work day and night, another's slot would else stay taken for ever."""
    running(client, monkeypatch, target="shop")
    with alone_on("left over"):
        assert taken(client) == 1
    assert taken(client) == 0


def test_a_slot_that_another_run_takes_first_is_busy(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that find it left over, one is first; the other's error told people of a failed night."""
    running(client, monkeypatch, target="shop")
    monkeypatch.setattr(one_at_a_time, "_given_back", lambda name: True)
    with pytest.raises(TargetBusy, match="another run works on left over"), alone_on("left over"):
        pytest.fail("two at once")


@pytest.mark.parametrize(
    ("parameters", "may"),
    [({}, True), ({"params": {}}, True), ({"params": "x"}, True), ({"params": {"target": "Left over"}}, True),
     ({"params": {"target": "shop"}}, False)],
)  # fmt: skip
def test_whose_target_nobody_knows_may_hold_it(parameters: dict[str, Any], may: bool) -> None:
    run: Any = SimpleNamespace(parameters=parameters)
    assert one_at_a_time._may_hold(run, NAME) is may
