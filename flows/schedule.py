"""Rounds on a schedule in one process: the smallest way to run every night (a work pool is the larger one)."""

from __future__ import annotations

from typing import Any

from prefect import serve
from prefect.schedules import Cron

from errors import ConfigurationError
from flows.improve import ImproveParameters, improve

# Prefect finds a deployment by flow and name: `improve/improve` is that of `trace-agent deploy`, with its work pool.
NAME = "schedule"
# As in prefect.yaml: a run whose process was killed is found by its tag and its missing heartbeat.
TAGS, HEARTBEAT_SECONDS = ["trace"], 30


def serve_schedule(cron: str, target: str | None, profile: str | None) -> None:
    """Serve the deployment `improve/schedule` until stopped; one round at a time. Stopped it is paused: else the nights
    on which nobody served it would be played one after another at the next start, which lets it run again. Raises
    `ConfigurationError` for a `cron` that is none."""
    parameters = {"params": ImproveParameters(target=target, profile=profile).model_dump(exclude_none=True)}
    try:
        when = Cron(cron, timezone="UTC")
    except ValueError as problem:
        raise ConfigurationError(f"--cron = {cron!r}: {problem}; write five fields, such as '0 2 * * *'") from None
    # The annotation of to_deployment allows for async callers; here it is the deployment itself.
    deployment: Any = improve.to_deployment(
        name=NAME, tags=TAGS, schedules=[when], parameters=parameters, concurrency_limit=1
    )
    serve(deployment, limit=1, heartbeat_seconds=HEARTBEAT_SECONDS)
