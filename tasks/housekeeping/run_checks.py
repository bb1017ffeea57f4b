"""Whether the runs that a Prefect server has on its schedules find somebody who runs them: else nights do not happen,
and there is no run that could say so."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import httpx

from models.adapters.registry import without_password
from tasks.housekeeping.findings import Finding, fault, warning, well

if TYPE_CHECKING:
    from prefect.client.schemas.responses import DeploymentResponse

# What `trace-agent deploy` and `trace-agent schedule` mark as this project's.
TAG = "trace"
# Late runs that are counted one by one.
MOST = 200


def scheduled_runs() -> Finding:
    """The deployments of this project on the Prefect server that is named, which answers: none is without a worker, and
    no run waits for one. What is paused was paused by somebody, and is only told."""
    from prefect.exceptions import PrefectException

    try:
        deployments, late = _asked()
    except (PrefectException, httpx.HTTPError) as problem:
        # Where it answers with an error, the library's words hold the whole address.
        why = f"{type(problem).__name__}: {without_password(str(problem))[:200]}"
        said = f"Prefect's server does not say what it runs ({why})"
        return fault("runs", said, "look at its log, and at PREFECT_API_AUTH_STRING where it wants a password")
    if not deployments:
        return well("runs", "the Prefect server has no deployment of this project ('trace-agent deploy' makes them)")
    if left := [d for d in deployments if _is_wanted(d) and d.status == "NOT_READY"]:
        said = ", ".join(f"{d.name} ({_since(d.last_polled)})" for d in left)
        return warning("runs", f"nobody asks for runs of {said}: nights do not happen", "'trace-agent up' has a worker")
    if late:
        said = f"{late}{' or more' if late == MOST else ''} runs are late: they wait for a worker that has room"
        return warning("runs", said, "look at the work pool in Prefect's pages")
    return well("runs", "; ".join(f"{d.name} is {_standing(d)}" for d in deployments))


def _asked() -> tuple[list[DeploymentResponse], int]:
    """The project's deployments by name, and how many of their runs are late."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterTags,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateName,
    )

    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG]))
    late = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Late"])))
    with get_client(sync_client=True) as client:
        found = client.read_deployments(deployment_filter=ours)
        waiting = client.read_flow_runs(flow_run_filter=late, deployment_filter=ours, limit=MOST)
    return sorted(found, key=lambda deployment: deployment.name), len(waiting)


def _is_wanted(deployment: DeploymentResponse) -> bool:
    return not deployment.paused and any(schedule.active for schedule in deployment.schedules)


def _standing(deployment: DeploymentResponse) -> str:
    if deployment.paused:
        return "paused"
    return "scheduled" if _is_wanted(deployment) else "run by hand"


def _since(moment: datetime | None) -> str:
    return f"the last time {moment:%Y-%m-%d %H:%M} UTC" if moment else "never yet"
