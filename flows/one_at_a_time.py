"""One run of a deployment at a time on a target: a concurrency limit of Prefect's for each, made when first needed.

The stage ledger already keeps two processes from doing one thing twice; this keeps a run that finds another at work
from waiting for it. The slot is a lease: Prefect takes it back from a process that died.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment

from errors import TargetBusy

# How long a run waits for the slot, and how long Prefect keeps that of a process that died.
SECONDS, LEASE_SECONDS = 1.0, 60.0


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
