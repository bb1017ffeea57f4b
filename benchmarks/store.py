"""How fast trajectories with their steps and checks are stored, and whether replaying them changes anything.

python -m benchmarks.store                                   # a SQLite file in a temporary folder
python -m benchmarks.store postgres                          # a PostgreSQL server of its own, where it is installed
python -m benchmarks.store postgresql://user:pw@host/empty   # an empty PostgreSQL database
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy as np

from db import CheckRow, StepRow, Store, TrajectoryRow, open_store
from tests.db.postgres_server import running_postgres

TRAJECTORIES, STEPS, BATCH, TOKENS, SERIES = 2000, 10, 200, 400, 5


def batches(round_id: str, series: int) -> list[list[TrajectoryRow]]:
    """Trajectories of 10 steps (200 characters of text and JSON arguments each), 4 checks and 400 tokens with
    log-probabilities."""
    draw = np.random.default_rng(series)
    words = ["order", "refund", "cancel", "status", "address", "customer", "please", "item"]
    mask = np.arange(TOKENS) % 4 == 0
    rows = []
    for n in range(TRAJECTORIES):
        text = " ".join(draw.choice(words, 30))[:200]
        ids = draw.integers(0, 49_000, TOKENS, dtype=np.int32)
        logprobs = np.where(mask, -draw.exponential(size=TOKENS), 0.0).astype(np.float32)
        steps = tuple(
            StepRow(
                {
                    "content": "",
                    "tool_calls": [{"name": "get_order", "arguments": {"id": n * STEPS + i, "full": True}}],
                },
                [{"role": "tool", "content": text, "tool_call_id": str(i)}],
                10,
                12.5,
            )
            for i in range(STEPS)
        )
        rows.append(
            TrajectoryRow(
                id=f"{series:04x}{n:012x}",
                round_id=round_id,
                purpose="diagnosis",
                target="shop",
                data_hash="bench",
                environment="shop",
                task_id=f"task-{n % 100}",
                family="cancel",
                split="diagnosis",
                seed=n,
                trial=n // 100,
                policy_id="base",
                base="small",
                termination="done",
                reward=0.5,
                success=n % 2 == 0,
                sampled_tokens=100,
                messages=[{"role": "user", "content": text}],
                token_ids=ids,
                sampled_mask=mask,
                logprobs=logprobs,
                steps=steps,
                checks=tuple(CheckRow(f"check-{i}", "cancel_order", True, i != n % 4) for i in range(4)),
            )
        )
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def contents(store: Store) -> list[str]:
    """One line a table that changes when any figure in it does."""
    figures = {
        "trajectories": "COUNT(*), SUM(seed), SUM(reward), SUM(LENGTH(token_ids)), MAX(created_at)",
        "steps": "COUNT(*), SUM(idx), SUM(milliseconds)",
        "checks": "COUNT(*), SUM(idx), MAX(name)",
    }
    return [f"{t}: {store.query(f'SELECT {f} FROM {t}').iloc[0].tolist()}" for t, f in figures.items()]


def timed(store: Store, given: list[list[TrajectoryRow]], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    for batch in given:
        store.add_trajectories(batch)
    return clock() - began


def measure(url: str) -> None:
    """Print the rates for one database and end with an error when a replay changed something."""
    with open_store(url) as store:
        round_id = store.start_round("shop", "bench", 0, "bench", {}).id
        rows = TRAJECTORIES * STEPS
        rates = []
        for series in range(SERIES):
            given = batches(round_id, series)
            rates.append(rows / timed(store, given))
        print(f"{store.url}")
        print(
            f"  stored {SERIES} x {rows} steps, with {TRAJECTORIES} trajectories and {TRAJECTORIES * 4} checks each, "
            f"{BATCH} a transaction"
        )
        shown = f"best {max(rates):,.0f}, median {median(rates):,.0f}, worst {min(rates):,.0f}"
        print(f"  step rows/s: {shown}")
        before = contents(store)
        again = timed(store, given)
        print(f"  replayed  in {again:.2f} s: {rows / again:,.0f} step rows/s")
        if contents(store) != before:
            raise SystemExit("the replay changed the database")
        print(f"  the replay changed nothing ({before[1]})")
        stored = store.query("SELECT SUM(LENGTH(token_ids)) i, SUM(LENGTH(logprobs)) l FROM trajectories").iloc[0]
        tokens = SERIES * TRAJECTORIES * TOKENS
        print(
            f"  bytes a token: ids {stored.i / tokens:.2f}, log-probabilities "
            f"{stored.l / tokens:.2f} (a quarter of them sampled)"
        )
        began = time.perf_counter()
        frame = store.trajectory_frame(round_id)
        print(f"  read back {len(frame)} trajectories as a frame in {time.perf_counter() - began:.2f} s")
    began = time.perf_counter()
    open_store(url).close()
    print(f"  opened again in {time.perf_counter() - began:.3f} s")


def plain(file: Path, given: list[list[TrajectoryRow]]) -> float:
    """Processor seconds in which sqlite3 alone stores the same columns, ready made, in equal transactions."""
    from db.rows.trajectories import check_values, step_values, trajectory_values
    from db.writes import _written_out

    with open_store(f"sqlite:///{file}") as store, closing(sqlite3.connect(file)) as raw:
        round_id = store.start_round("shop", "bench", 0, "bench", {}).id
        with store._engines.write.connect() as connection:
            ready = [
                [
                    ("trajectories", _written_out(connection, [trajectory_values(row) | {"round_id": round_id}])[0])
                    if table == "trajectories"
                    else (table, values)
                    for row in batch
                    for table, found in (
                        ("trajectories", [{}]),
                        ("steps", step_values(row)),
                        ("checks", check_values(row)),
                    )
                    for values in found
                ]
                for batch in given
            ]
        raw.execute("PRAGMA synchronous=NORMAL")
        began = time.process_time()
        for batch in ready:
            for table in ("trajectories", "steps", "checks"):
                rows = [tuple(values.values()) for name, values in batch if name == table]
                columns = next(", ".join(values) for name, values in batch if name == table)
                raw.executemany(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(rows[0]))})", rows)
            raw.commit()
        return time.process_time() - began


def figures() -> dict[str, float]:
    """The store on a SQLite file as a multiple (processor time) of sqlite3 alone; best of three."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for series in range(3):
            with open_store(f"sqlite:///{folder}/ours-{series}.db") as store:
                given = batches(store.start_round("shop", "bench", 0, "bench", {}).id, series)
                ours.append(timed(store, given, time.process_time))
            theirs.append(plain(Path(folder) / f"plain-{series}.db", given))
    return {"insert / sqlite3": min(ours) / min(theirs)}


if __name__ == "__main__":
    if sys.argv[1:] == ["postgres"]:
        with running_postgres() as server:
            measure(f"{server}/postgres")
    elif len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(f"sqlite:///{folder}/trace.db")
