"""Nights that a schedule wanted while no worker was there. Prefect keeps a run of each, and a worker that comes back
would play them one after another; one is enough, as a round goes on from what is live today.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled

from db.values.types import utc_now
from models.adapters.registry import without_password

logger = logging.getLogger("trace")
# What the server has inserted for a schedule, and no worker has taken.
WAITING = ["Scheduled", "Late"]
# So many are cancelled at once; a next run finds the rest.
MOST = 200


def makes_way() -> Any:
    """In a run that a schedule wanted: Prefect's state with which it ends, as a later run of the same deployment, with
    the same parameters, is due by now and does the same; None where it is the newest. Those between the two are
    cancelled, with a line. What a person ordered, or goes on, is done, and waits for nobody."""
    if not deployment.id or not flow_run.id:
        return None
    try:
        with get_client(sync_client=True) as client:
            mine = client.read_flow_run(UUID(flow_run.id))
            later = _due(client, mine)
            for run in later[:-1]:
                _let_go(client, run, later[-1])
    except Exception as problem:  # a night too many is better than none
        why = without_password(str(problem))
        logger.warning("it is not known whether later runs are due (%s: %s)", type(problem).__name__, why)
        return None
    if not later:
        return None
    said = _said(mine, later[-1])
    logger.warning("%s", said)
    return Cancelled(message=said)


def _due(client: SyncPrefectClient, mine: FlowRun) -> list[FlowRun]:
    """Runs that the schedule wanted after `mine`, and that are due, in order; none where `mine` is no such run."""
    begun_before = (mine.run_count or 0) > 1
    if not mine.auto_scheduled or begun_before or mine.expected_start_time is None:
        return []
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[UUID(str(deployment.id))]),
            state=FlowRunFilterState(name=FlowRunFilterStateName(any_=WAITING)),
            expected_start_time=FlowRunFilterExpectedStartTime(after_=mine.expected_start_time, before_=utc_now()),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=MOST,
    )
    return [
        run
        for run in found
        if run.auto_scheduled
        and not run.run_count
        and run.parameters == mine.parameters
        and _when(run) > mine.expected_start_time
    ]


def _let_go(client: SyncPrefectClient, run: FlowRun, newest: FlowRun) -> None:
    said: Any = Cancelled(message=_said(run, newest))
    if client.set_flow_run_state(run.id, said).status == SetStateStatus.ACCEPT:
        logger.warning("%s", said.message)


def _said(run: FlowRun, newest: FlowRun) -> str:
    return (
        f"the run of {_when(run):%Y-%m-%d %H:%M} UTC is not made up for: nobody was there to do it, and that of "
        f"{_when(newest):%Y-%m-%d %H:%M} UTC is due"
    )


def _when(run: FlowRun) -> datetime:
    assert run.expected_start_time is not None, "a schedule says when"
    return run.expected_start_time
