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
REFUSE = """
import time
from flows.cli.early_server import start_early
server = start_early()
while {wait} and not server._processes:
    time.sleep(0.01)
began = time.monotonic()
server.stop()
print(time.monotonic() - began, *[process.pid for process in server._processes], flush=True)
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


@pytest.mark.parametrize("launched", [True, False], ids=["launched", "not launched yet"])
def test_a_server_that_is_not_needed_ends_while_it_starts(tmp_path: Path, launched: bool) -> None:
    environment = clean_environment(PREFECT_HOME=str(tmp_path / "prefect"), PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", REFUSE.format(wait=launched)]
    done = subprocess.run(command, capture_output=True, env=environment, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, *servers = done.stdout.split()
    assert float(seconds) < 3
    assert len(servers) == launched
    assert not any(alive(int(pid)) for pid in servers)
    assert "Traceback" not in done.stderr
