"""Start Prefect's temporary server while the model's libraries are imported: each takes about as long as the other.

A watcher ends the server with this process, also when the process is killed: Prefect stops its server in an exit
handler only, and a process that a signal kills runs no exit handler.
"""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

# A server that is still starting may finish that before it heeds the request to end: then it is killed.
SECONDS_TO_END = 1.0


class EarlyServer:
    """A server that is being started in a thread. Both methods do nothing when none is needed."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._launching = threading.Lock()  # held while there is a process that is not noted in `_processes` yet
        self._stopped = False
        self._processes: list[subprocess.Popen[Any]] = []

    def begin(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._start, name="prefect-server", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the server answers; an error of its start is raised here."""
        if self._thread is not None:
            self._thread.join()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """End the server, or never launch it, without waiting until it has started."""
        with self._launching:
            self._stopped = True
        for process in self._processes:
            process.terminate()
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        try:
            from prefect.server.api.server import SubprocessASGIServer

            server = SubprocessASGIServer()  # one per process: the flow finds this one
            launch = server._run_uvicorn_command

            def watched() -> subprocess.Popen[Any]:
                with self._launching:
                    if self._stopped:
                        raise RuntimeError("Prefect's server is not needed any more")
                    process = launch()
                    self._processes.append(process)
                    _end_together(os.getpid(), process.pid)
                return process

            # Prefect launches a second process when its port was taken meanwhile; each is watched from its beginning.
            server._run_uvicorn_command = watched  # type: ignore[method-assign]
            server.start()
        except Exception as problem:  # carried to the thread that waits
            self._problem = problem


def start_early() -> EarlyServer:
    """Begin to start the server that a flow without an API URL gets.

    With `PREFECT_API_URL` set, or temporary servers forbidden, nothing is started. An error of the server is raised
    by `wait`, not here.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    server = EarlyServer()
    if not settings.api.url and settings.server.ephemeral.enabled:
        settings.home.mkdir(parents=True, exist_ok=True)  # Prefect makes it later, in the flow; the server needs it now
        server.begin()
    return server


def _end_together(process: int, server: int) -> None:
    """Have a watcher of its own stop `server` when `process` is gone. It ends with either."""
    lives = "kill -0 {} 2>/dev/null"
    watch = f"while {lives.format(process)} && {lives.format(server)}; do sleep 2; done; kill {server} 2>/dev/null"
    quiet = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", watch], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
