"""Start Prefect's temporary server while the model's libraries are imported: each takes about as long as the other.

Prefect would start the same server inside the flow, for which it imports the whole server into the flow's process too
(150 modules, two seconds). Started from here it is reached by address alone, and only with the services that one round
needs: nobody schedules, triggers or looks at events on a server that ends with the round.

A watcher ends the server with this process, also when the process is killed: an exit handler, as Prefect has one, is
not run by a process that a signal kills.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from errors import StoreError

# A server that is still starting may finish that before it heeds the request to end: then it is killed.
SECONDS_TO_END = 1.0
# At the end of a round what it was sent last is still being written.
SECONDS_TO_WRITE = 5.0
# What Prefect sets for its temporary server (`SubprocessASGIServer`), and services that a round does not use, off: the
# feed of events with its clean-up, automations, and block types (the page of `make ui` registers them when it starts).
# Runs, task runs, logs and artifacts are recorded all the same.
SERVER = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
}
# The collector would look through everything that is imported again and again: a third of the server's start.
START = (
    "import gc, sys; gc.disable(); import prefect.server.api.server; gc.freeze(); gc.enable(); "
    "from uvicorn.main import main; main()"
)


class EarlyServer:
    """A server that is being started. Both methods do nothing when none is needed."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._first: FirstStart | None = None
        self.url = ""

    def begin(self, seconds: float, first: FirstStart | None = None) -> None:
        """Launch it; a thread asks it for `seconds` at most whether it answers, and ends `first` then."""
        self._first = first
        # The socket is made here and handed on: no other process can take the port in between, and a question waits
        # in it until the server is there to answer.
        with socket.create_server(("127.0.0.1", 0)) as given:
            command = [sys.executable, "-c", START, "--factory", "prefect.server.api.server:create_app"]
            command += ["--fd", str(given.fileno()), "--log-level", "error", "--lifespan", "on"]
            self.url = f"http://127.0.0.1:{given.getsockname()[1]}/api"
            # In a session of its own: Ctrl-C in a terminal reaches the round alone, which still writes to the server.
            process = subprocess.Popen(command, env=_environment(), pass_fds=[given.fileno()], start_new_session=True)
        self._processes.append(process)
        atexit.register(self.stop, SECONDS_TO_WRITE)  # before Prefect's own handlers, so it runs after them
        _end_together(os.getpid(), process.pid)
        self._thread = threading.Thread(target=self._ask, args=(seconds,), name="prefect-server", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the server answers. Raises `StoreError` when it ended, or did not answer in time."""
        if self._thread is not None:
            self._thread.join()
        if self._problem is not None:
            try:
                how = f"ended with code {self._processes[-1].wait(SECONDS_TO_END)} while it started"
            except subprocess.TimeoutExpired:
                how = f"does not answer ({self._problem})"
            raise StoreError(
                f"Prefect's temporary server {how}; look at the lines above, check that PREFECT_HOME can be written, "
                "or name a server of your own with PREFECT_API_URL"
            ) from self._problem

    def stop(self, seconds: float = SECONDS_TO_END) -> None:
        """End the server, without waiting until it has started; after `seconds` it is killed."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _ask(self, seconds: float) -> None:
        try:
            # No proxy stands between this process and its own server, whatever the environment says.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{self.url}/health", timeout=seconds):
                pass
        except (OSError, urllib.error.URLError) as problem:  # carried to the thread that waits
            self._problem = problem
        finally:
            if self._first is not None:
                self._first.end(done=self._problem is None)


class FirstStart:
    """The start that makes Prefect's tables in `home`; rounds that begin meanwhile wait for it.

    Prefect's migrations do not expect a second process: of several servers that first start together, all but one
    fail on an index or a table that another has just made or dropped.
    """

    def __init__(self, home: Path, version: str) -> None:
        self._done = home / f".tables-{version}"
        self._lock: IO[bytes] | None = None
        if self._done.exists():
            return
        self._lock = open(home / ".first-start.lock", "wb")  # noqa: SIM115 (held until the server answers)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, where only this protection is missing
            self.end(done=False)
        else:
            if self._done.exists():
                self.end(done=False)

    def end(self, *, done: bool) -> None:
        """Let the others start; `done` says that the tables are there. A second call does nothing."""
        if self._lock is not None:
            if done:
                self._done.touch()
            self._lock.close()
            self._lock = None


def start_early() -> EarlyServer:
    """Begin to start the server that a flow without an API URL gets, and have the flow use it.

    With `PREFECT_API_URL` set, or temporary servers forbidden, nothing is started. An error of the server is raised
    by `wait`, not here.
    """
    import prefect
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    server = EarlyServer()
    if not settings.api.url and settings.server.ephemeral.enabled:
        try:
            settings.home.mkdir(parents=True, exist_ok=True)  # Prefect makes it in the flow; the server needs it now
            first = FirstStart(settings.home, prefect.__version__)
        except OSError as problem:
            raise StoreError(
                f"Prefect's home {str(settings.home)!r} cannot be written ({problem.strerror}); "
                "name a folder that you may write to with PREFECT_HOME"
            ) from problem
        server.begin(float(settings.server.ephemeral.startup_timeout_seconds), first)
        os.environ["PREFECT_API_URL"] = server.url
        refresh_global_settings_context()
    return server


def _environment() -> dict[str, str]:
    """What the server gets: this process's settings of Prefect, those of a profile among them, and `SERVER`."""
    from prefect.settings import get_current_settings

    return {**os.environ, **get_current_settings().to_environment_variables(exclude_unset=True), **SERVER}


def _end_together(process: int, server: int) -> None:
    """Have a watcher of its own stop `server` when `process` is gone. It ends with either."""
    lives = "kill -0 {} 2>/dev/null"
    watch = f"while {lives.format(process)} && {lives.format(server)}; do sleep 2; done; kill {server} 2>/dev/null"
    quiet = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", watch], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
