"""Rounds on a schedule in one process: the smallest way to run every night (a work pool is the larger one)."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

from prefect import serve
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron

from db.values.types import utc_now
from errors import ConfigurationError
from flows.improve import ImproveParameters, improve

# Prefect finds a deployment by flow and name: `improve/improve` is that of `trace-agent deploy`, with its work pool.
NAME = "schedule"
# As in prefect.yaml: a run whose process was killed is found by its tag and its missing heartbeat.
TAGS, HEARTBEAT_SECONDS = ["trace"], 30
# Who serves it asks the server for runs every ten seconds: so long after the last time it was asked nobody does.
SILENT, ASKED_EVERY = timedelta(seconds=35), 2.0


def serve_schedule(cron: str, target: str | None, profile: str | None) -> None:
    """Serve the deployment `improve/schedule` until stopped; one round at a time. Stopped it is paused: else the nights
    on which nobody served it would be played one after another at the next start, which lets it run again. Raises
    `ConfigurationError` for a `cron` that is none, and where another process serves it."""
    parameters = {"params": ImproveParameters(target=target, profile=profile).model_dump(exclude_none=True)}
    try:
        when = Cron(cron, timezone="UTC")
    except ValueError as problem:
        raise ConfigurationError(f"--cron = {cron!r}: {problem}; write five fields, such as '0 2 * * *'") from None
    _check_alone()
    # The annotation of to_deployment allows for async callers; here it is the deployment itself.
    deployment: Any = improve.to_deployment(
        name=NAME, tags=TAGS, schedules=[when], parameters=parameters, concurrency_limit=1
    )
    serve(deployment, limit=1, heartbeat_seconds=HEARTBEAT_SECONDS)


def _check_alone() -> None:
    """Raise `ConfigurationError` where another process serves the deployment: this one would put its own target and
    time in place of the other's, and whoever stops first pauses it for both. One that was killed just now is waited
    for until it is known to be gone."""
    first = _asked()
    while first is not None and utc_now() - first < SILENT:
        time.sleep(ASKED_EVERY)
        if _asked() != first:
            raise ConfigurationError(
                f"another 'trace-agent schedule' serves improve/{NAME} on this Prefect server, and a second would take "
                "its place; stop that one first, or, for a second target, add a schedule with other parameters to "
                "improve/improve in Prefect's pages (docs/9-unattended.md)"
            )


def _asked() -> datetime | None:
    """When somebody last asked for runs of the deployment; None where it was not made yet, or was stopped."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(f"{improve.name}/{NAME}")
        except ObjectNotFound:
            return None
    return None if found.paused else found.last_polled
