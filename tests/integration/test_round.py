"""A whole round on the embedded model, its files in object storage, killed twice and started again, the second time in
an empty home: it goes on from what is owed, and another home has all that it made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.storage_served import s3_served

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.integration
# The whole test takes three minutes of an idle machine with two cores.
LIMIT_SECONDS = 1500
STEPS = 3
STORAGE = "STORAGE_OF_THE_TEST"


@pytest.fixture(autouse=True)
def _storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with s3_served() as address:
        monkeypatch.setenv(STORAGE, address)
        yield


def environment(folder: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_") or k == "TRACE_CACHE"}
    return clean | {
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(folder / "prefect"),
        "TRACE_TRAIN__STEPS": str(STEPS),
        "TRACE_TRAIN__SOLVED": "1.0",
        "TRACE_TRAIN__COLLECTIONS": "4",
        # What outlives the home.
        "TRACE_DATABASE": f"sqlite:///{folder}/trace.db",
        "TRACE_TRACKING": f"sqlite:///{folder}/mlflow.db",
        "TRACE_FILES": f"{os.environ[STORAGE]}/round",
    }


def command(folder: Path, *arguments: str, home: str = "home") -> list[str]:
    return [sys.executable, "-m", "flows.cli.main", *arguments, "--home", str(folder / home)]


def run(folder: Path, *arguments: str, home: str = "home") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments, home=home),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def ask(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows from the store; none while it is not there yet."""
    path = folder / "trace.db"
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
            command(folder, "improve", "--profile", "smoke"),
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
                time.sleep(0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return count(folder, what)


def told(folder: Path, name: str) -> str:
    """All that a database says."""
    with closing(sqlite3.connect(folder / name)) as opened:
        return "\n".join(opened.iterdump())


def test_a_round_that_was_killed_goes_on_and_stores_nothing_twice(tmp_path: Path) -> None:
    diagnosis = "trajectories WHERE purpose = 'diagnosis'"
    before = kill_once_there_are(tmp_path, 5, diagnosis)
    first = {i for (i,) in ask(tmp_path, f"SELECT id FROM {diagnosis}")}

    steps = kill_once_there_are(tmp_path, 1, "training_steps")
    assert 1 <= steps < STEPS, "the kill came before training was over"
    assert count(tmp_path, diagnosis) == 36 > before, "the second start played what the first still owed"
    assert first <= {i for (i,) in ask(tmp_path, f"SELECT id FROM {diagnosis}")}
    trained = ask(tmp_path, "SELECT step, reward, loss, seconds FROM training_steps ORDER BY step")

    shutil.rmtree(tmp_path / "home")  # the machine is lost; checkpoints and weights of the steps are in the storage
    done = run(tmp_path, "improve", "--profile", "smoke")
    assert done.returncode == 0, done.stderr[-3000:]
    after = ask(tmp_path, "SELECT step, reward, loss, seconds FROM training_steps ORDER BY step")
    assert [step for step, *_ in after] == list(range(1, STEPS + 1)), "every optimizer step once"
    # The checkpoint is written after the row, so of the rows seen at the kill only the last may be a step done again.
    assert after[: steps - 1] == trained[: steps - 1]

    assert count(tmp_path, "rounds") == 1
    total = count(tmp_path, "trajectories")
    assert ask(tmp_path, "SELECT COUNT(DISTINCT id) FROM trajectories") == [(total,)]
    assert count(tmp_path, "stages WHERE state NOT IN ('done', 'skipped')") == 0
    assert count(tmp_path, "trajectories WHERE error IS NOT NULL AND reward IS NOT NULL") == 0

    (report,) = (tmp_path / "home").glob("*/report.html")
    status = run(tmp_path, "status", "--json")
    assert status.returncode == 0
    figures = json.loads(status.stdout)
    assert figures == json.loads((report.parent / "figures.json").read_text())
    assert any(c["adapter"] for c in figures["capabilities"]), "one capability was trained and registered"

    page = report.read_text()
    (stored,) = ask(tmp_path, "SELECT result FROM stages WHERE name = 'report'")
    assert json.loads(stored[0])["page"] == f"{report.parent.name}/report.html", "a path of any home"
    shutil.rmtree(tmp_path / "home")
    elsewhere = run(tmp_path, "status", "--json", home="elsewhere")
    assert json.loads(elsewhere.stdout) == figures, elsewhere.stderr[-2000:]
    assert run(tmp_path, "report", home="elsewhere").returncode == 0
    assert (tmp_path / "elsewhere" / report.parent.name / "report.html").read_text() == page
    for name in ("trace.db", "mlflow.db"):
        assert str(tmp_path / "home") not in told(tmp_path, name), "no registry knows where the home was"
    assert set(figures["work"]) == {"model", "environment", "earlier", "orchestration"}
    listed = json.loads(run(tmp_path, "rounds", "--json").stdout)
    assert [r["state"] for r in listed] == ["done"]
