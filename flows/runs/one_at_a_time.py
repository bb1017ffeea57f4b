"""What a run of a deployment has to know of the others: that none is at work on its target, and whether those before
it died. One at a time is a concurrency limit of Prefect's for each target, made when first needed.

The stage ledger already keeps two processes from doing one thing twice; this keeps a run that finds another at work
from waiting for it. The slot is a lease: Prefect takes it back from a process that died. A server that keeps its leases
in memory, as Prefect's default is, forgets them when it is restarted, and the slot stays taken for ever; so a slot that
is taken while no other run is under way is given back here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import takewhile
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment, flow_run

from errors import TargetBusy, TraceError
from settings import load_settings

logger = logging.getLogger("trace")
# How long a run waits for the slot (a server that has just started takes seconds to answer), and how long Prefect keeps
# that of a process that died.
SECONDS, LEASE_SECONDS = 20.0, 60.0
MOST_DEATHS = 20
# States of a run that holds its slot, or is about to.
UNDER_WAY = [StateType.RUNNING, StateType.PENDING, StateType.PAUSED, StateType.CANCELLING]


def limit_name(target: str) -> str:
    """The limit's name in Prefect, such as `trace-tau2-retail`."""
    return "trace-" + re.sub(r"[^a-z0-9]+", "-", target.lower()).strip("-")


@contextmanager
def alone_on(target: str) -> Iterator[None]:
    """Hold the target's one slot, in a run of a deployment; others run where nobody schedules. Raises `TargetBusy` when
    another run holds it. A server that is restarted meanwhile does not end the run."""
    name = limit_name(target)
    with ExitStack() as held:
        if deployment.id:
            with get_client(sync_client=True) as client:
                client.upsert_global_concurrency_limit_by_name(name, 1)
            if not (_entered(held, name) or (_given_back(name) and _entered(held, name))):
                raise TargetBusy(
                    f"another run works on {target} (Prefect's limit {name!r} is taken); it goes on, and this one has "
                    "nothing to do: the next one on the schedule goes on from there"
                )
        yield


def _entered(held: ExitStack, name: str) -> bool:
    """Whether the slot became ours."""
    try:
        held.enter_context(_slot(name))
    except TimeoutError:
        return False
    return True


def _slot(name: str) -> AbstractContextManager[None]:
    """The limit's one slot; entered, it waits for it. Raises `TimeoutError` when it stays taken."""
    return concurrency(
        name, timeout_seconds=SECONDS, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False
    )


def _given_back(name: str) -> bool:
    """Give back a slot that no run can hold, as no other run is under way but on other targets; False where one is."""
    others = FlowRunFilter(
        id=FlowRunFilterId(not_any_=[UUID(flow_run.id)]) if flow_run.id else None,
        deployment_id=FlowRunFilterDeploymentId(is_null_=False),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY)),
    )
    with get_client(sync_client=True) as client:
        if any(_may_hold(run, name) for run in client.read_flow_runs(flow_run_filter=others)):
            return False
        logger.warning("Prefect's limit %r is taken and no other run is under way: its slot is given back", name)
        client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(active_slots=0))
    return True


def _may_hold(run: FlowRun, name: str) -> bool:
    """Whether a run may hold the slot: its parameters name the slot's target, or none, which leaves it to the settings
    of its worker."""
    given = (run.parameters or {}).get("params")
    target = given.get("target") if isinstance(given, dict) else None  # others' flows have parameters of their own
    return not target or limit_name(str(target)) == name


def deaths_before(target: str = "") -> dict[str, str]:
    """In a run of a deployment: how the runs just before it died, as Prefect has it, by their ids, oldest first; none
    where the last one did not, or nobody knows. With `target` those on it alone: a deployment may play several in turn.
    A process that is killed tells nobody, one that Prefect could not start neither, and nor does a run of the one
    before it when it dies too soon: so all are given that died in a row."""
    if not deployment.id:
        return {}
    ended = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(TERMINAL_STATES))),
    )
    try:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(flow_run_filter=ended, sort=FlowRunSort.END_TIME_DESC, limit=MOST_DEATHS)
    except Exception as problem:  # the round is worth more than the news of the last one
        logger.warning("it is not known how the run before this one ended (%s)", type(problem).__name__)
        return {}
    if target:
        runs = [run for run in runs if _target_of(run, target) == target]
    # What was cancelled before it began says nothing of those before it.
    runs = [run for run in runs if not (run.state and run.state.type == StateType.CANCELLED and not run.start_time)]
    dead = list(takewhile(lambda run: run.state is not None and run.state.type == StateType.CRASHED, runs))
    return {str(run.id): f"{run.name} ({run.state.message or 'no word of why'})" for run in reversed(dead) if run.state}


def _target_of(run: FlowRun, otherwise: str) -> str:
    """The target that a run's parameters give, or leave to the settings; `otherwise` where they are none that may be:
    such a run did not come to its target."""
    given = (run.parameters or {}).get("params") or {}
    try:
        return load_settings(target=given.get("target"), profile=given.get("profile")).target
    except TraceError:
        return otherwise
