"""`trace-agent evaluate` as a user calls it: killed and started again, a provider that is down, one line for what is
wrong."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_command_line import ROOT, refused, trace_agent
from tests.models.providers.chat_server import agent, calls, says
from tests.models.providers.scripted_analyst import ScriptedAnalyst

pytestmark = pytest.mark.integration
TARGET = "tests.tasks.counting_target:target"


def slow_model(number: int, request: dict[str, Any]) -> dict[str, Any]:
    """Counts, taking its time."""
    step = says("Counted.") if request["messages"][-1]["role"] == "tool" else calls(("count", {"n": 2}))
    return step | {"seconds": 0.3}


def arguments(folder: Path, server: ScriptedAnalyst) -> list[str]:
    given = ["--target", TARGET, "--policy", "my-model", "--api-base", server.api_base, "--price", "1,1"]
    return ["evaluate", *given, "--workers", "1", "--home", str(folder / "home"), "--json"]


def finished(folder: Path) -> int:
    path = folder / "home" / "trace.db"
    if not path.is_file():
        return 0
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as connection:
        try:
            return int(connection.execute("SELECT COUNT(*) FROM trajectories WHERE error IS NULL").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def test_killed_and_started_again_it_plays_only_what_is_owed(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_")} | {"PYTHONPATH": str(ROOT)}
    with agent(slow_model) as server:
        command = [sys.executable, "-m", "flows.cli.main", *arguments(tmp_path, server)]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            until = time.monotonic() + 300
            while finished(tmp_path) < 3 and time.monotonic() < until and process.poll() is None:
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept, asked = finished(tmp_path), len(server.requests)
        assert 3 <= kept < 8
        done = trace_agent(tmp_path, *arguments(tmp_path, server))
        assert done.returncode == 0, done.stderr[-2000:]
        # Two turns for each episode that is owed, and the question whether the model calls tools.
        assert len(server.requests) - asked == 2 * (8 - kept) + 1
    rows = json.loads(done.stdout)
    assert [(r["policy"], r["owed"], r["scored"]["episodes"]) for r in rows] == [("my-model", 0, 8), ("noop", 0, 8)]
    assert rows[0]["scored"]["success"] == 0.125


def test_a_server_that_is_down_is_one_line(tmp_path: Path) -> None:
    given = ["--policy", "vllm:http://127.0.0.1:9#base", "--home", str(tmp_path / "home")]
    assert "does not list its models" in refused(trace_agent(tmp_path, "evaluate", "--target", TARGET, *given))
