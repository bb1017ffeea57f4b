"""What a round shows on Prefect's pages. They are for people who look; the store is the record. So a Prefect server
that is away takes a table from them, and neither ends a stage nor keeps it waiting for long."""

from __future__ import annotations

import logging
from collections.abc import Callable

import httpx
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from models.adapters.registry import without_password

logger = logging.getLogger("trace")

# A server that is restarted is back by then (2, 4 and 8 s); the client's own five tries would take more than a minute.
TRIES_AGAIN = 3
# Answers of a server, or of a proxy before it, that others may follow.
TIMED_OUT, TOO_MANY, AT_FAULT = 408, 429, 500


def show(create: Callable[..., object], **given: object) -> None:
    """Have `create`, one of Prefect's functions that make an artifact, show what is `given` on Prefect's pages. A
    server that is away, or an error of Prefect's own, is a warning. What does not go away by itself, such as a refused
    key, raises `httpx.HTTPStatusError`."""
    tries = min(TRIES_AGAIN, PREFECT_CLIENT_MAX_RETRIES.value())
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: tries}):
            create(**given)
    except (httpx.HTTPError, PrefectException) as problem:
        if isinstance(problem, httpx.HTTPError) and not is_away(problem):
            raise
        why = f"{type(problem).__name__}: {without_password(str(problem))[:200]}"
        logger.warning("%r is not shown on Prefect's pages, and the stage goes on (%s)", given.get("key"), why)


def is_away(problem: Exception) -> bool:
    """Whether a request failed because Prefect's server is away, or cannot answer for now."""
    if isinstance(problem, httpx.HTTPStatusError):
        code = problem.response.status_code
        return code in (TIMED_OUT, TOO_MANY) or code >= AT_FAULT
    return isinstance(problem, httpx.TransportError)
