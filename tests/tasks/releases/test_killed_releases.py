"""A promotion or rollback may die anywhere: after the next start one release is live, in the store and in MLflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.integration
def test_a_death_anywhere_leaves_one_live_release_and_one_truth() -> None:
    # Every death begins from fresh copies of the stores: in memory where the machine has such a folder.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, "-m", "tests.tasks.releases.killed_releases", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row.pop("name"): row for row in map(json.loads, done.stdout.splitlines())}
    # (live before, live after) of each; nothing else was ever live, and deaths fell on both sides of the transaction.
    moves = {"promotion of the first": (0, 1), "promotion": (1, 2), "rollback": (2, 1), "rollback to the base": (1, 0)}
    assert list(found) == list(moves)
    for name, (before, after) in moves.items():
        assert found[name]["before"] == before
        assert set(found[name]["left"]) == {str(before), str(after)}, (name, found[name])
    killed = {name: row["killed"] for name, row in found.items()}
    assert killed["promotion of the first"] + killed["promotion"] >= 50
    assert killed["rollback"] + killed["rollback to the base"] >= 30
