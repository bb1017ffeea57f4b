"""Time and memory of the store and of all that reads it, against the number of trajectories (5 steps, 4 checks each).

    python -m benchmarks.scale                                    # 10^4 and 10^5 in a SQLite file of its own
    python -m benchmarks.scale --sizes 10000 100000 1000000       # half an hour, 5 GB in the temporary folder
    python -m benchmarks.scale --database postgres                # a PostgreSQL server of its own
    python -m benchmarks.scale --database postgresql://u:p@h/empty

One database grows from size to size. Reading happens in a process of its own for each figure, so its peak memory is its
own; `status` and the other commands are timed whole, start of Python included. The exponent is that of the last two
sizes: 0 means that size does not matter, 1 that it grows with it. An insert rate is that of the last tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from db import CheckRow, Round, RoundState, StepRow, Store, TrajectoryRow, open_store
from tests.db.postgres_server import running_postgres

PER_ROUND, BATCH, STEPS, CHECKS, TOKENS = 2000, 200, 5, 4, 200
CAPABILITIES, RUNS, TASKS = 20, 10, 5000


def trajectories(begin: int, end: int, round_id: str) -> list[TrajectoryRow]:
    """Trajectories `begin` to `end` of one round. Ids spread over their whole range, as hashes do."""
    draw = np.random.default_rng(begin)
    text = "the customer asks for a refund of an order that was delivered last week, and gives its number " * 2
    ids = draw.integers(0, 49_000, TOKENS, dtype=np.int32)
    mask = np.arange(TOKENS) % 4 == 0
    common = TrajectoryRow(
        id="",
        round_id=round_id,
        purpose="diagnosis",
        target="shop",
        data_hash="bench",
        environment="shop",
        task_id="",
        family="",
        split="diagnosis",
        seed=0,
        trial=0,
        policy_id="base",
        base="small",
        termination="done",
        sampled_tokens=TOKENS // 4,
        messages=[{"role": "user", "content": text}],
        token_ids=ids,
        sampled_mask=mask,
        logprobs=np.where(mask, -draw.exponential(size=TOKENS), 0.0).astype(np.float32),
        steps=[
            StepRow(
                {"content": "", "tool_calls": [{"name": "get_order", "arguments": {"id": i, "full": True}}]},
                [{"role": "tool", "content": text, "tool_call_id": str(i)}],
                TOKENS // 4 // STEPS,
                12.5,
            )
            for i in range(STEPS)
        ],
    )
    kinds = draw.integers(0, CAPABILITIES, (end - begin, CHECKS))
    won = draw.random(end - begin) < 0.5
    # Odd capabilities are lacking in failures above all, as what training can mend is.
    lacking = draw.random(kinds.shape) < np.where(won[:, None], 0.1, 0.1 + 0.5 * (kinds % 2))
    return [
        replace(
            common,
            id=f"{(begin + n) * 0x9E3779B97F4A7C15 % 2**64:016x}",
            task_id=f"task-{(begin + n) % TASKS:05d}",
            family=f"family-{(begin + n) % 18}",
            seed=begin + n,
            trial=(begin + n) // TASKS,
            reward=float(won[n]),
            success=bool(won[n]),
            checks=[
                CheckRow(f"check-{k}", f"capability_{k:02d}", True, not bad, "not as it should be" if bad else "")
                for k, bad in zip(kinds[n].tolist(), lacking[n].tolist(), strict=True)
            ],
        )
        for n in range(end - begin)
    ]


def fill(store: Store, begin: int, end: int) -> tuple[float, float]:
    """Store trajectories `begin` to `end`; wall and processor seconds a step row of the last tenth of `end`."""
    spent, used, counted, since = 0.0, 0.0, 0, end - end // 10
    for first in range(begin, end, PER_ROUND):
        one = store.start_round("shop", "bench", first, "laptop", {"seed": first})
        for batch in range(first, min(first + PER_ROUND, end), BATCH):
            rows = trajectories(batch, min(batch + BATCH, first + PER_ROUND, end), one.id)
            began, clock = time.perf_counter(), time.process_time()
            store.add_trajectories(rows)
            if batch >= since:
                spent, used = spent + time.perf_counter() - began, used + time.process_time() - clock
                counted += len(rows)
        store.finish_round(one.id, RoundState.DONE)
    return spent / (counted * STEPS), used / (counted * STEPS)


def contrast(store: Store) -> str:
    """Contrast by checks of one round, as the stage does it."""
    from tasks.mining.checks_analyst import bootstrap_labels, discover_candidates

    latest = store.latest_round()
    assert latest is not None
    frame = store.trajectory_frame(latest.id).rename(columns={"id": "trajectory_id", "success": "passed"})
    checks = store.check_frame(None, id=list(frame["trajectory_id"]))
    found = discover_candidates(checks, frame)
    return f"{len(found)} candidates, {len(bootstrap_labels(checks, frame, RUNS)):,} labels"


def selection(store: Store) -> str:
    """Selection over all trajectories, from the stored checks: 20 capabilities x 10 runs, streamed."""
    from tasks.mining.checks_analyst import label_matrix
    from tasks.mining.selection import select

    outcomes = store.trajectory_frame(None, columns=("id", "task_id", "success"), target="shop")
    outcomes = outcomes.rename(columns={"id": "trajectory_id", "success": "passed"})
    checks = store.check_frames(columns=("trajectory_id", "kind", "required", "passed"), target="shop")
    labels = label_matrix(checks, outcomes, RUNS)
    chosen = select(labels, n=RUNS)
    return f"{sum(c.selected for c in chosen)} of {len(chosen)} selected, {labels.pairs * RUNS:,} labels"


def walk(store: Store) -> str:
    """A round read whole, with steps and checks, one trajectory after another."""
    latest = store.latest_round()
    assert latest is not None
    return f"{sum(len(t.steps) for t in store.trajectories(latest.id)):,} steps"


def page(store: Store) -> str:
    """The figures of a round's report, and its page."""
    from environments.targets.catalogue import load_target
    from models.policy import PolicyIdentity
    from settings import load_settings
    from tasks.reporting.collect import figures_of
    from tasks.reporting.figures import Ending
    from tasks.reporting.nothing_trained import Ended
    from tasks.reporting.page import render
    from tasks.round.stored import StoredRound

    latest = store.latest_round()
    assert latest is not None
    settings = load_settings()
    stored, base = StoredRound(store, latest), PolicyIdentity("small", "", "", "", "")
    ended = Ended(Ending.TRAINED)
    figures = figures_of(stored, settings, load_target("shop"), base, ended)
    return f"{figures.tokens['total']:,} tokens, page of {len(render(figures)) // 1024} KiB"


READ: dict[str, Callable[[Store], str]] = {
    "contrast": contrast, "selection": selection, "walk": walk, "page": page,
}  # fmt: skip

IMPORTED = {
    "selection": ("tasks.mining.checks_analyst", "tasks.mining.selection"),
    "contrast": ("tasks.mining.checks_analyst",),
    "page": (
        "environments.targets.catalogue",
        "environments.targets.shop.target",
        "tasks.reporting.collect",
        "tasks.reporting.page",
    ),
}


@dataclass(frozen=True)
class Figure:
    """What one reading took: wall and processor seconds, peak GiB, and what it says."""

    seconds: float
    processor: float
    peak: float
    said: str = ""


def measured(command: list[str], environment: dict[str, str]) -> Figure:
    """A command, whole; `said` is its last line."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    last = (said.strip().splitlines() or [""])[-1]
    return Figure(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, last)


def read(url: str, home: Path, trajectory: str) -> Iterator[tuple[str, Figure]]:
    """All figures of reading at the present size."""
    environment = {**os.environ, "TRACE_DATABASE": url, "TRACE_HOME": str(home)}
    for name in READ:
        whole = measured([sys.executable, "-m", "benchmarks.scale", "--read", name], environment)
        inside = json.loads(whole.said)
        yield name, Figure(inside["seconds"], inside["processor"], whole.peak, inside["said"])
    for arguments in (["status"], ["rounds"], ["report"], ["show", trajectory], ["show", trajectory[:10]]):
        found = measured([sys.executable, "-m", "flows.cli.main", *arguments], environment)
        beginning = " by beginning" if arguments[-1] == trajectory[:10] else ""
        yield f"{arguments[0]}{beginning}", replace(found, said="")


def read_one(name: str) -> None:
    """The child process of `read`: seconds without the imports, as JSON."""
    for module in ("pandas", *IMPORTED.get(name, ())):  # before the clock
        importlib.import_module(module)
    with open_store(os.environ["TRACE_DATABASE"]) as store:
        began, clock = time.perf_counter(), time.process_time()
        said = READ[name](store)
        seconds, processor = time.perf_counter() - began, time.process_time() - clock
        print(json.dumps({"seconds": seconds, "processor": processor, "said": said}))


@contextlib.contextmanager
def database(given: str, folder: Path) -> Iterator[str]:
    """The URL of the database that is to be filled."""
    if given == "postgres":
        with running_postgres() as server:
            yield f"{server}/postgres"
    else:
        yield given or f"sqlite:///{folder / 'trace.db'}"


def figures() -> dict[str, float]:
    """Processor time in a database of 50,000 as a multiple of that in one of 5,000: what grows with size."""
    small, large, found = 5_000, 50_000, dict[str, list[float]]()
    with tempfile.TemporaryDirectory(prefix="trace-scale-") as folder, open_store(f"sqlite:///{folder}/t.db") as store:
        for begin, end in ((0, small), (small, large)):
            fill(store, begin, end - PER_ROUND)
            pieces: dict[str, Callable[[], object]] = {
                "insert": partial(fill, store, end - PER_ROUND, end),
                "a round read whole": partial(walk, store),
                "contrast of a round": partial(contrast, store),
                "selection": partial(selection, store),
            }
            for name, work in pieces.items():
                if begin == 0 and name != "insert":
                    work()  # else the small database would pay for imports, and for what is made once
                began = time.process_time()
                work()
                found.setdefault(name, []).append(time.process_time() - began)
    per = {"selection": large / small}  # it reads all there is: a trajectory's share
    return {f"{name}, 50,000 / 5,000": times[1] / times[0] / per.get(name, 1) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--database", default="")
    parser.add_argument("--read", choices=READ, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read_one(options.read)
        return
    seen: dict[str, list[tuple[int, Figure]]] = {}
    with tempfile.TemporaryDirectory(prefix="trace-scale-") as name, database(options.database, Path(name)) as url:
        folder, before = Path(name), 0
        for size in sorted(options.sizes):
            with open_store(url) as store:
                if not before and store.rows(Round):
                    raise SystemExit(f"{store.url} holds rounds already; give an empty database")
                began = time.perf_counter()
                wall, processor = fill(store, before, size)
            took = time.perf_counter() - began
            print(
                f"{size:,} trajectories, {1 / wall:,.0f} step rows/s, {1 / processor:,.0f} a processor second", end=""
            )
            print(f" (filled in {took:.0f} s)\n  {'':<20} {'wall':>8} {'processor':>9} {'peak':>8}", flush=True)
            before = size
            seen.setdefault("insert", []).append((size, Figure(wall, processor, 0.0)))
            middle = trajectories(size // 2, size // 2 + 1, "")[0].id
            for what, f in read(url, folder / "home", middle):
                seen.setdefault(what, []).append((size, f))
                print(f"  {what:<20} {f.seconds:6.2f} s {f.processor:7.2f} s {f.peak:4.2f} GiB  {f.said}", flush=True)
            shutil.rmtree(folder / "home")
            used = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            print(f"  {used / 2**20:,.0f} MiB in the folder" if used else "", flush=True)
    print("exponents of wall and processor time, and of memory:")
    for what, figures in seen.items():
        if len(figures) > 1:
            (a, old), (b, new) = figures[-2:]
            pairs = ((old.seconds, new.seconds), (old.processor, new.processor), (old.peak, new.peak))
            grown = [f"{math.log(y / x) / math.log(b / a):6.2f}" if x and y else "" for x, y in pairs]
            print(f"  {what:<20} {' '.join(grown)}")


if __name__ == "__main__":
    main()
