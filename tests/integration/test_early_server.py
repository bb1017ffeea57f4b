"""Prefect's temporary server does not outlive the process that started it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from flows.cli.early_server import FirstStart
from tests.db.homes.prefect_homes import prefect_home
from tests.integration.servers import clean_environment
from tests.integration.test_command_line import ROOT

pytestmark = pytest.mark.integration
START = """
import time
from flows.cli.early_server import start_early
server = start_early()
server.wait()
print(server._processes[0].pid, flush=True)
time.sleep(600)
"""
REFUSE = """
import time
from flows.cli.early_server import start_early
server = start_early()
began = time.monotonic()
server.stop()
print(time.monotonic() - began, *[process.pid for process in server._processes], flush=True)
"""
# A flow on the server, and what the server keeps of it after the process is gone.
FLOW = """
import sys
from flows.cli.early_server import start_early
server = start_early()
server.wait()
from prefect import flow, task

@task
def double(n: int) -> int:
    return 2 * n

@flow
def doubled() -> int:
    return double(21)

assert doubled() == 42
print("imported", "prefect.server.api.server" in sys.modules)
"""
WAIT = """
from flows.cli.early_server import start_early
server = start_early()
server.wait()
print(len(server._processes))
"""


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    environment = clean_environment(PREFECT_HOME=prefect_home(tmp_path), PYTHONPATH=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        try:
            assert alive(server)
            # Ctrl-C in a terminal goes to the round's group; the round has yet to write how it ended.
            assert os.getpgid(server) != os.getpgid(process.pid)
            process.kill()
            process.wait()
            until = time.monotonic() + 30
            while alive(server) and time.monotonic() < until:
                time.sleep(0.2)
            assert not alive(server)
        finally:
            with suppress(ProcessLookupError):
                os.kill(server, 9)


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code with a Prefect home of its own."""
    given = clean_environment(**{"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(ROOT), **environment})
    return subprocess.run([sys.executable, "-c", code], capture_output=True, env=given, text=True, timeout=180)


def test_a_server_that_is_not_needed_ends_while_it_starts(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSE)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, *servers = done.stdout.split()
    assert float(seconds) < 3
    assert len(servers) == 1
    assert not any(alive(int(pid)) for pid in servers)
    assert "Traceback" not in done.stderr


def test_a_flow_uses_the_server_without_importing_it(tmp_path: Path) -> None:
    done = run(tmp_path, FLOW)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["imported", "False"]
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as kept:
        states = [kept.execute(f"SELECT name, state_type FROM {t}").fetchone() for t in ("flow_run", "task_run")]
    assert [state for _, state in states] == ["COMPLETED", "COMPLETED"]
    assert states[1][0].startswith("double")


def test_none_is_started_where_there_is_one(tmp_path: Path) -> None:
    done = run(tmp_path, WAIT, PREFECT_API_URL="http://127.0.0.1:1/api")
    assert done.stdout.split() == ["0"], done.stderr[-2000:]


def test_a_home_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = run(tmp_path, WAIT, PREFECT_HOME=str(tmp_path / "file" / "home"))
    assert done.returncode == 1
    assert "StoreError: Prefect's home" in done.stderr
    assert "PREFECT_HOME" in done.stderr


def test_a_server_that_ends_while_it_starts_is_one_clear_error(tmp_path: Path) -> None:
    # A database that it cannot open.
    done = run(tmp_path, WAIT, PREFECT_SERVER_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{tmp_path}/none/x.db")
    assert done.returncode == 1
    assert "StoreError: Prefect's temporary server ended with code 3 while it started" in done.stderr


@pytest.mark.parametrize("done", [True, False])
def test_who_starts_first_on_a_home_makes_its_tables_and_others_wait(tmp_path: Path, done: bool) -> None:
    first = FirstStart(tmp_path, "1")
    others: list[FirstStart] = []
    waiting = threading.Thread(target=lambda: others.append(FirstStart(tmp_path, "1")), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert not others
    first.end(done=done)
    waiting.join(10)
    # Where the first one failed, the next makes them, and a third still waits.
    assert (others[0]._lock is None) is done
    others[0].end(done=True)
    assert FirstStart(tmp_path, "1")._lock is None
    assert FirstStart(tmp_path, "2")._lock is not None
