"""Rounds on a schedule in one process: the smallest way to run every night (a work pool is the larger one)."""

from __future__ import annotations

from typing import Any

from prefect import serve
from prefect.schedules import Cron

from flows.improve import ImproveParameters, improve


def serve_schedule(cron: str, target: str | None, profile: str | None) -> None:
    """Serve the deployment `improve` until stopped; one round at a time."""
    parameters = {"params": ImproveParameters(target=target, profile=profile).model_dump(exclude_none=True)}
    # The annotation of to_deployment allows for async callers; here it is the deployment itself.
    deployment: Any = improve.to_deployment(
        name="improve", schedules=[Cron(cron, timezone="UTC")], parameters=parameters, concurrency_limit=1
    )
    serve(deployment, limit=1)
