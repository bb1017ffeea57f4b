"""Starting a server for a test: a free port, a wait until it answers, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.operations.jobs import end_group

BROWSER = next((path for n in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(n))), None)
QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OMP_NUM_THREADS": "1",
    # A machine that is busy otherwise starts the embedded server late; Prefect waits 20 seconds by itself.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
}


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment(**given: str) -> dict[str, str]:
    """This process's environment without settings of Prefect, MLflow or the project, and with `given`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "TRACE_"))}
    return kept | QUIET | given


def status(url: str, host: str | None = None) -> int:
    """The HTTP status of a GET of `url`, 0 when nobody answers. `host` replaces the Host header."""
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as problem:
        return problem.code
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return 0


@contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    ready: Callable[[], bool],
    *,
    seconds: float = 240,
) -> Iterator[None]:
    """`command` in a process group of its own, from when `ready()` is true to the end of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=dict(environment), cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + seconds
        while not ready():
            late = time.monotonic() > deadline
            if late or process.poll() is not None:
                tail = log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"{' '.join(command)}: {'not ready' if late else 'ended'}\n{tail}")
            time.sleep(0.3)
        yield
    finally:
        end_group(process)
