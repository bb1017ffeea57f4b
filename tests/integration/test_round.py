"""A whole round, killed in the rollout and in training and started again: it goes on from what is owed.

On a tiny random model, whose rounds take seconds: what a kill leaves has nothing to do with the model. Rounds on the
embedded model are killed while they label (`test_written_round.py`).
"""

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

from db.rows import PROCESS
from tests.db.homes.prefect_homes import prefect_home
from tests.integration.shapes.rounds_played import HOT, TARGET, TEMPLATES
from tests.integration.shapes.shapes_served import saved_shape
from tests.integration.targets.signs import SIZE
from tests.tokenizers_trained import shipped_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.integration
# The whole test takes a minute and a half of an idle machine with two cores.
LIMIT_SECONDS = 900
STEPS = int(HOT["TRAIN__STEPS"])
# Episodes of the diagnosis: enough that a kill comes before the last of them.
TRIALS = 40
IMPROVE = ("improve", "--profile", "smoke", "--target", TARGET)


def environment(folder: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_") or k == "TRACE_CACHE"}
    given = {
        **HOT,
        "BASE_MODEL": str(folder / "base"),
        "ROLLOUT__TRIALS": str(TRIALS),
        "ROLLOUT__ROWS": "8",
        "TRAIN__SOLVED": "1.0",
    }
    return (
        clean
        | {f"TRACE_{name}": value for name, value in given.items()}
        | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": prefect_home(folder)}
    )


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli.main", *arguments, "--home", str(folder / "home")]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def ask(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows from the store; none while it is not there yet."""
    path = folder / "home" / "trace.db"
    if not path.is_file():
        return []
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as connection:
        try:
            return list(connection.execute(query).fetchall())
        except sqlite3.OperationalError:
            return []


def count(folder: Path, what: str) -> int:
    rows = ask(folder, f"SELECT COUNT(*) FROM {what}")
    return int(rows[0][0]) if rows else 0


def kill_once_there_are(folder: Path, wanted: int, what: str) -> int:
    """Start a round, or go on with it; SIGKILL everything once the store counts `wanted`; the count after that."""
    log = folder / "killed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(folder, *IMPROVE),
            cwd=folder,
            env=environment(folder),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + LIMIT_SECONDS
            while count(folder, what) < wanted:
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < until, f"no {wanted} of {what} within {LIMIT_SECONDS} s"
                time.sleep(0.02)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return count(folder, what)


def test_a_round_that_was_killed_goes_on_and_stores_nothing_twice(tmp_path: Path) -> None:
    saved_shape("llama", tmp_path / "base", shipped_tokenizer(TEMPLATES["llama"]))
    diagnosis = "trajectories WHERE purpose = 'diagnosis'"
    before = kill_once_there_are(tmp_path, 5, diagnosis)
    first = {i for (i,) in ask(tmp_path, f"SELECT id FROM {diagnosis}")}

    steps = kill_once_there_are(tmp_path, 1, "training_steps")
    assert 1 <= steps < STEPS, "the kill came before training was over"
    assert count(tmp_path, diagnosis) == SIZE * TRIALS > before, "the second start played what the first still owed"
    assert first <= {i for (i,) in ask(tmp_path, f"SELECT id FROM {diagnosis}")}
    ((adapter,),) = ask(tmp_path, "SELECT DISTINCT adapter_id FROM training_steps")
    made = f"SELECT step, reward, loss, seconds FROM training_steps WHERE adapter_id = '{adapter}' ORDER BY step"
    trained = ask(tmp_path, made)

    done = run(tmp_path, *IMPROVE)
    assert done.returncode == 0, done.stderr[-3000:]
    after = ask(tmp_path, made)
    assert [step for step, *_ in after] == list(range(1, STEPS + 1)), "every optimizer step once"
    # The checkpoint is written after the row, so of the rows seen at the kill only the last may be a step done again.
    assert after[: steps - 1] == trained[: steps - 1]

    assert count(tmp_path, "rounds") == 1
    total = count(tmp_path, "trajectories")
    assert ask(tmp_path, "SELECT COUNT(DISTINCT id) FROM trajectories") == [(total,)]
    # A killed process's presence stays beside the stages until its lease has run out: no quick round waits for it.
    owed = f"stages WHERE state NOT IN ('done', 'skipped') AND name NOT LIKE '{PROCESS}%'"
    assert count(tmp_path, owed) == 0
    assert count(tmp_path, "trajectories WHERE error IS NOT NULL AND reward IS NOT NULL") == 0

    (report,) = (tmp_path / "home").glob("*/report.html")
    status = run(tmp_path, "status", "--json")
    assert status.returncode == 0
    figures = json.loads(status.stdout)
    assert figures == json.loads((report.parent / "figures.json").read_text())
    assert any(c["adapter"] for c in figures["capabilities"]), "one capability was trained and registered"
    assert set(figures["work"]) == {"model", "environment", "earlier", "orchestration"}
    listed = json.loads(run(tmp_path, "rounds", "--json").stdout)
    assert [r["state"] for r in listed] == ["done"]
