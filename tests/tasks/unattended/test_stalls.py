"""A run that hangs ends itself and says where it stood; one that moves, or waits for a person, does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.unattended.stalls import hung_before

ROOT = Path(__file__).parents[3]
SECONDS = 0.4
HANGS = "def waits_for_ever(): threading.Event().wait()\nwith watched(MINUTES, folder): waits_for_ever()"
MOVES = "with watched(MINUTES, folder):\n for _ in range(16): pulse(); time.sleep(0.05)"
PERSON = "with watched(MINUTES, folder):\n with unwatched(): pulse(); time.sleep(0.8)"
AFTER = "with watched(MINUTES, folder): pass\ntime.sleep(0.8)"
NEVER = "with watched(0, folder): time.sleep(0.1)"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import pathlib, sys, threading, time\nfrom tasks.unattended.stalls import *\n"
        f"folder, MINUTES = pathlib.Path(sys.argv[1]), {SECONDS / 60}\n"
    )
    command = [sys.executable, "-c", head + code, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_run_that_hangs_ends_and_leaves_its_stacks(tmp_path: Path) -> None:
    assert run(tmp_path, HANGS).returncode == 1
    left = hung_before(tmp_path)
    assert left is not None
    assert "waits_for_ever" in left.read_text()
    assert hung_before(tmp_path) is None, "it is told once"


@pytest.mark.parametrize("code", [MOVES, PERSON, AFTER, NEVER])
def test_what_moves_or_need_not_move_is_left_alone(tmp_path: Path, code: str) -> None:
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_process_ends_with_the_one_that_ordered_it() -> None:
    """However that one went: its end of the pipe is closed by the kernel."""
    code = "import threading\nfrom models.deadline import *\nend_with_parent()\n"
    code += "print(0, flush=True)\nthreading.Event().wait()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    process.stdin.close()
    assert process.wait(30) < 0
    process.stdout.close()
