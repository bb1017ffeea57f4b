"""Start Prefect's temporary server while the model's libraries are imported: each takes about as long as the other.

A watcher ends the server with this process, also when the process is killed: Prefect stops its server in an exit
handler only, and a process that a signal kills runs no exit handler.
"""

from __future__ import annotations

import os
import subprocess
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
            server = SubprocessASGIServer()  # one per process: the flow finds this one
            server.start()
            if server.server_process is not None:
                _end_together(os.getpid(), server.server_process.pid)
        except Exception as problem:  # carried to the thread that waits
            problems.append(problem)

    starting = threading.Thread(target=start, name="prefect-server", daemon=True)
    starting.start()

    def wait() -> None:
        starting.join()
        if problems:
            raise problems[0]

    return wait


def _end_together(process: int, server: int) -> None:
    """Have a watcher of its own stop `server` when `process` is gone. It ends with either."""
    lives = "kill -0 {} 2>/dev/null"
    watch = f"while {lives.format(process)} && {lives.format(server)}; do sleep 2; done; kill {server} 2>/dev/null"
    quiet = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", watch], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
