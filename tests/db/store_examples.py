"""Rows to store, and what other processes do in the concurrency tests."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import text

from db import CheckRow, Round, StepRow, TrajectoryRow, open_store


def trajectory(round_id: str | None, name: str = "t1", **changes: Any) -> TrajectoryRow:
    """A failed episode with two steps and two checks."""
    row = TrajectoryRow(
        id=name,
        round_id=round_id,
        purpose="diagnosis",
        target="shop",
        data_hash="data1",
        environment="shop",
        task_id="task-1",
        family="cancel",
        split="diagnosis",
        seed=2**40 + 3,
        trial=0,
        policy_id="base1",
        base="small",
        termination="done",
        reward=0.25,
        success=False,
        prompt_tokens=120,
        sampled_tokens=4,
        seconds=0.5,
        metrics={"similarity": 0.5},
        messages=[{"role": "user", "content": "cancel it, please: ü 🛒"}],
        token_ids=np.arange(6, dtype=np.int64) * 30000,
        sampled_mask=[False, False, True, True, True, True],
        logprobs=[0.0, 0.0, -0.5, -1.25, -0.125, -7.0],
        steps=(
            StepRow({"tool_calls": [{"name": "look_up", "arguments": {"id": 3}}]}, [{"role": "tool"}], 2, 11.0),
            StepRow({"content": "done"}, [], 2, 12.0),
        ),
        checks=(
            CheckRow("looked_up", "look_up_first", True, True),
            CheckRow("cancelled", "cancel_order", True, False, "order is still open"),
        ),
    )
    return replace(row, **changes)


def failure(round_id: str | None, name: str = "t1", **changes: Any) -> TrajectoryRow:
    """An episode that the infrastructure broke after one step."""
    return trajectory(
        round_id,
        name,
        **{
            "reward": None,
            "success": None,
            "termination": "error",
            "error_boundary": "provider",
            "error": "502 from the provider",
            "steps": (StepRow({"content": "half"}, [], 1, 1.0), StepRow({}, []), StepRow({}, [])),
            "checks": (),
        }
        | changes,
    )


# What runs in processes of its own (argv: URL and further words).


def count_up(url: str, times: str) -> None:
    """Read a number, add one, write it back: loses updates unless reading and writing are one."""
    with open_store(url) as store:
        for _ in range(int(times)):
            with store.transaction() as connection:
                value = connection.execute(text("SELECT peak_gib FROM rounds")).scalar_one()
                connection.execute(text("UPDATE rounds SET peak_gib = :value"), {"value": value + 1})


def start_rounds(url: str, times: str) -> None:
    with open_store(url) as store:
        for _ in range(int(times)):
            store.start_round("shop", "d", os.getpid(), "laptop", {})


def open_only(url: str) -> None:
    with open_store(url) as store:
        print(len(store.rows(Round)))


def claim(url: str, round_id: str, at: str) -> None:
    """Claim at the same moment as the others."""
    with open_store(url) as store:
        stage = store.stage(round_id, "rollout")
        time.sleep(max(0.0, float(at) - time.time()))
        print(stage.claim(lease_seconds=60))


def write_forever(url: str, round_id: str) -> None:
    """Batches of trajectories until killed; says after each that it is stored."""
    with open_store(url) as store:
        for batch in range(100_000):
            store.add_trajectories([trajectory(round_id, f"b{batch:05}-{i}") for i in range(20)])
            print(batch, flush=True)


def claim_and_hang(url: str, round_id: str) -> None:
    with open_store(url) as store:
        stage = store.stage(round_id, "train:cancel_order")
        print(stage.claim(lease_seconds=1.0), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
