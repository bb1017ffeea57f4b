"""What a run of a deployment has to know of the others: that none is at work on its target, and whether the one before
it died. One at a time is a concurrency limit of Prefect's for each target, made when first needed.

The stage ledger already keeps two processes from doing one thing twice; this keeps a run that finds another at work
from waiting for it. The slot is a lease: Prefect takes it back from a process that died.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment

from errors import TargetBusy

logger = logging.getLogger("trace")
# How long a run waits for the slot (a server that has just started takes seconds to answer), and how long Prefect keeps
# that of a process that died.
SECONDS, LEASE_SECONDS = 20.0, 60.0


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
            slot = concurrency(
                name, timeout_seconds=SECONDS, strict=True, lease_duration=LEASE_SECONDS,
                raise_on_lease_renewal_failure=False,
            )  # fmt: skip
            try:
                held.enter_context(slot)
            except TimeoutError as problem:
                raise TargetBusy(
                    f"another run works on {target} (Prefect's limit {name!r} is taken); it goes on, and this one has "
                    "nothing to do: the next one on the schedule goes on from there"
                ) from problem
        yield


def death_before() -> str:
    """In a run of a deployment: how the run before it died, as Prefect has it; "" where it did not, or nobody knows. A
    process that is killed tells nobody, and neither does one that Prefect could not start."""
    if not deployment.id:
        return ""
    ended = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(TERMINAL_STATES))),
    )
    try:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(flow_run_filter=ended, sort=FlowRunSort.END_TIME_DESC, limit=1)
    except Exception as problem:  # the round is worth more than the news of the last one
        logger.warning("how the run before this one ended is not known (%s)", type(problem).__name__)
        return ""
    if not runs or runs[0].state is None or runs[0].state.type != StateType.CRASHED:
        return ""
    return f"{runs[0].name} ({runs[0].state.message or 'no word of why'})"
