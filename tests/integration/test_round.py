"""A whole round on the embedded model, killed in the middle and started again."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not os.environ.get("TRACE_TEST_ROUND"), reason="takes minutes of a quiet machine; set TRACE_TEST_ROUND=1"
    ),
]
# A whole round; a machine that is busy otherwise needs several times the 4 minutes of an idle one.
LIMIT_SECONDS = 900


def environment(folder: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_") or k == "TRACE_CACHE"}
    return clean | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "prefect")}


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli", *arguments, "--home", str(folder / "home")]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def count(folder: Path, query: str) -> int:
    """A figure from the store, 0 while it is not there yet."""
    path = folder / "home" / "trace.db"
    if not path.is_file():
        return 0
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as connection:
        try:
            return int(connection.execute(query).fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def killed_when(folder: Path, query: str, wanted: int) -> int:
    """Start a round and kill it with SIGKILL once `query` counts `wanted`; the count after the kill."""
    with (folder / "killed.log").open("wb") as log:
        process = subprocess.Popen(
            command(folder, "improve", "--profile", "smoke"),
            cwd=folder,
            env=environment(folder),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + LIMIT_SECONDS
            while count(folder, query) < wanted:
                assert process.poll() is None, (folder / "killed.log").read_text()[-2000:]
                assert time.monotonic() < until
                time.sleep(0.2)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return count(folder, query)


def test_a_round_that_was_killed_goes_on_and_ends(tmp_path: Path) -> None:
    before = killed_when(tmp_path, "SELECT COUNT(*) FROM trajectories", 40)
    assert before >= 40
    done = run(tmp_path, "improve", "--profile", "smoke")
    assert done.returncode == 0, done.stderr[-3000:]
    assert count(tmp_path, "SELECT COUNT(*) FROM rounds") == 1
    total = count(tmp_path, "SELECT COUNT(*) FROM trajectories")
    assert total > before
    assert count(tmp_path, "SELECT COUNT(DISTINCT id) FROM trajectories") == total
    assert count(tmp_path, "SELECT COUNT(*) FROM stages WHERE state NOT IN ('done', 'skipped')") == 0
    assert count(tmp_path, "SELECT COUNT(*) FROM trajectories WHERE error IS NOT NULL AND reward IS NOT NULL") == 0
    (report,) = (tmp_path / "home").glob("*/report.html")
    assert (report.parent / "figures.json").is_file()
    status = run(tmp_path, "status", "--json")
    assert status.returncode == 0
    assert json.loads(status.stdout) == json.loads((report.parent / "figures.json").read_text())
    listed = json.loads(run(tmp_path, "rounds", "--json").stdout)
    assert [r["state"] for r in listed] == ["done"]
    # What is done is done: the same command again is another round, which the list tells apart.
    again = killed_when(tmp_path, "SELECT COUNT(*) FROM rounds", 2)
    assert again == 2
