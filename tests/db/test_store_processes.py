"""Several processes at once, and processes that die, on both databases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_examples import trajectory

from db import Round, RoundState, SpendRow, Store, open_store

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).with_name("store_examples.py")


def start(name: str, *argv: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKERS), name, *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What all of them printed; each must have ended well."""
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err[-2000:]
        printed.append(out.strip())
    return printed


def test_reading_and_then_writing_loses_no_update(store: Store, round_: Round, database_url: str) -> None:
    store.set_state(Round, round_.id, RoundState.RUNNING, peak_gib=0.0)
    outputs([start("count_up", database_url, "150") for _ in range(3)])
    assert store.round(round_.id).peak_gib == 450


def test_rounds_started_at_once_have_different_numbers(store: Store, database_url: str) -> None:
    outputs([start("start_rounds", database_url, "20") for _ in range(3)])
    assert sorted(row.number for row in store.rows(Round)) == list(range(1, 61))


def test_a_fresh_database_may_be_opened_by_several_at_once(database_url: str) -> None:
    assert outputs([start("open_only", database_url) for _ in range(3)]) == ["0", "0", "0"]


def test_of_two_claims_one_wins(store: Store, round_: Round, database_url: str) -> None:
    at = str(time.time() + 2.0)
    printed = outputs([start("claim", database_url, round_.id, at) for _ in range(2)])
    assert sorted(printed) == ["False", "True"]
    assert store.stage(round_.id, "rollout").row().attempt == 1


def test_killed_in_the_middle_of_writing(store: Store, round_: Round, database_url: str) -> None:
    process = start("write_forever", database_url, round_.id)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 10:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.communicate(timeout=30)[0].split()
    said = int(rest[-1]) if rest else 10
    with open_store(database_url) as after:
        frame = after.trajectory_frame(round_.id)
        # All that was said to be stored is there, batches are whole, and every trajectory has its steps and checks.
        assert len(frame) in ((said + 1) * 20, (said + 2) * 20)
        assert after.step_frame(round_.id).groupby("trajectory_id").size().tolist() == [2] * len(frame)
        assert len(after.check_frame(round_.id)) == 2 * len(frame)
        assert after.add_trajectories([trajectory(round_.id, "after")]).added == 1
        if database_url.startswith("sqlite"):
            assert after.query("PRAGMA integrity_check").iloc[0, 0] == "ok"


def test_the_stage_of_a_killed_process_is_taken_over(store: Store, round_: Round, database_url: str) -> None:
    process = start("claim_and_hang", database_url, round_.id)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "True"
    stage = store.stage(round_.id, "train:cancel_order")
    assert not stage.claim()
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while not stage.claim():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert stage.row().attempt == 2


def test_a_forked_child_has_connections_of_its_own(store: Store, round_: Round) -> None:
    child = os.fork()
    if child == 0:
        store.put([SpendRow(id="child", round_id=round_.id, stage="s", model="m")])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    store.put([SpendRow(id="parent", round_id=round_.id, stage="s", model="m")])
    assert [row.id for row in store.rows(SpendRow)] == ["child", "parent"]


@pytest.mark.parametrize("threads", [8])
def test_threads_share_a_store(store: Store, round_: Round, threads: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    batches = [[trajectory(round_.id, f"{n}-{i}") for i in range(25)] for n in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        written = list(pool.map(store.add_trajectories, batches + batches))
    assert sum(w.added for w in written) == 25 * threads
    assert len(store.trajectory_frame(round_.id)) == 25 * threads
