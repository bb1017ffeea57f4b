"""Prefect's temporary server takes as long to start as the model's libraries take to import: both at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_early() -> Callable[[], None]:
    """Begin to start the server that a flow without an API URL gets; returns what waits until it answers.

    With `PREFECT_API_URL` set, or temporary servers forbidden, nothing is started. An error of the server is raised
    by the wait, not here.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url or not settings.server.ephemeral.enabled:
        return lambda: None
    settings.home.mkdir(parents=True, exist_ok=True)  # Prefect makes it later, in the flow; the server needs it now
    problems: list[Exception] = []

    def start() -> None:
        from prefect.server.api.server import SubprocessASGIServer

        try:
            SubprocessASGIServer().start()  # one per process: the flow finds this one
        except Exception as problem:  # carried to the thread that waits
            problems.append(problem)

    starting = threading.Thread(target=start, name="prefect-server", daemon=True)
    starting.start()

    def wait() -> None:
        starting.join()
        if problems:
            raise problems[0]

    return wait
