"""Prefect's temporary server does not outlive the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.servers import clean_environment
from tests.integration.test_command_line import ROOT

pytestmark = pytest.mark.integration
START = """
import time
from flows.cli.early_server import start_early
start_early().wait()
from prefect.server.api.server import SubprocessASGIServer
print(SubprocessASGIServer().server_process.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    environment = clean_environment(PREFECT_HOME=str(tmp_path / "prefect"), PYTHONPATH=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        try:
            assert alive(server)
            process.kill()
            process.wait()
            until = time.monotonic() + 30
            while alive(server) and time.monotonic() < until:
                time.sleep(0.2)
            assert not alive(server)
        finally:
            with suppress(ProcessLookupError):
                os.kill(server, 9)
