"""A month left alone, in an hour: a schedule of small rounds back to back, while what it stands on is broken.

    python -m benchmarks.month                            # 20 rounds, 10 kills; as root (it mounts a disk in memory)
    python -m benchmarks.month --rounds 4 --kills 1 --seed 3 --keep FOLDER

Everything is what `trace-agent up` runs: Prefect's server, MLflow's, a worker on a process pool with the deployments of
`trace-agent deploy`, the gateway; the store is in PostgreSQL. Only the model (random, three layers) and the target
(`benchmarks/month_target.py`) are small, so that a round takes seconds. Each night is a run of the deployment
`improve`, begun when the one before has ended. In some, drawn by the seed, at a moment drawn by the seed:

- the worker's process group is killed (SIGKILL), every other time the run's process with it: `--kills` times;
- Prefect's server is stopped and started again: twice; PostgreSQL: once, open sessions ended;
- the home's disk is filled to the last byte until the run ends, for 45 seconds at most: once;
- the webhook's receiver is down, over three nights.

A night that is over before its moment leaves that to a later one, and rounds go on until all of it has happened.

Prints a table of nights and of promises (`benchmarks/month_promises.py` has how each is checked); exits with 1 when
one is broken. Ctrl-C ends it after the night that is under way, with the promises of the nights until then.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.month_promises import (
    Night,
    Promise,
    Witness,
    doctor_promise,
    growth_promises,
    rows_promise,
    struck_promise,
    stuck_promise,
    told_promise,
)
from benchmarks.month_services import Deployment, Disk, Receiver
from db import Round, Store, open_store
from db.rows import PROCESS
from errors import StoreError
from settings import load_settings
from tasks.unattended.notices import deliver
from tests.db.postgres_server import Postgres

KILL, PREFECT, POSTGRES, FULL = "worker killed", "Prefect restarted", "PostgreSQL restarted", "disk full"
ENDS = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
DISK_MIB, FULL_SECONDS = 384, 45.0
# A run that takes longer than this is given up: it is stuck.
MOST_SECONDS = 900.0
MOST_TO_START, MOST_TO_ROLL_BACK = 60.0, 10.0


def plan(rounds: int, kills: int, seed: int) -> dict[int, tuple[str, float]]:
    """Night -> what happens in it, and at which part of a usual night. Killed nights come on top of the rounds."""
    rng = random.Random(seed)
    faults = [KILL] * kills + [PREFECT, PREFECT, POSTGRES, FULL]
    # The first two nights show what is usual, the last what is left.
    nights = range(3, max(rounds + kills, len(faults) + 3))
    rng.shuffle(faults)
    return {
        n: (f, rng.uniform(0.05, 0.95)) for n, f in zip(sorted(rng.sample(nights, len(faults))), faults, strict=True)
    }


def put_off(faults: dict[int, tuple[str, float]], night: int) -> None:
    """What came too late in its night happens in the next that has none, at an earlier part of it."""
    fault, part = faults.pop(night)
    faults[next(n for n in count(night + 1) if n not in faults)] = fault, part / 2


class Month:
    """The nights so far, and what they run on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.receiver, self.witness = folder, Receiver(), Witness()
        (folder / "postgres").mkdir()
        self.postgres, self.disk = Postgres(folder / "postgres"), Disk(folder / "home", DISK_MIB)
        self.nights: list[Night] = []
        self.stopped = False
        self.kills = 0
        self.receiver.start()
        self.postgres.start()
        self.deployment = Deployment(folder, self.disk.folder, f"{self.postgres.url}/postgres", self.receiver.url)
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = open_store(f"{self.postgres.url}/postgres")
        return self._store

    def close(self) -> None:
        self.deployment.stop()
        if self._store is not None:
            self._store.close()
        self.postgres.stop()
        self.receiver.stop()
        self.disk.close()

    def usual(self) -> float:
        """Seconds of a night to which nothing happened."""
        quiet = sorted(n.seconds for n in self.nights if not n.fault and n.state == "COMPLETED")
        return quiet[len(quiet) // 2] if quiet else 60.0

    def night(self, fault: str, part: float) -> Night:
        """One run of the deployment to its end, with what happens to it."""
        night = Night(len(self.nights) + 1, fault)
        self.nights.append(night)
        began, at = time.monotonic(), part * self.usual() if fault else float("inf")
        night.began, night.run = datetime.now(UTC).isoformat(), self._trigger()
        ended: Callable[[], object] = bool
        last, seen, until = began, "", float("inf")
        while night.state not in ENDS and time.monotonic() - began < MOST_SECONDS:
            time.sleep(1)
            now = time.monotonic()
            found = self.deployment.prefect(f"/flow_runs/{night.run}")
            if found is not None:
                night.state, night.message = found["state"]["type"], found["state"].get("message") or ""
            moved = f"{night.state} {self._progress(night)}"
            night.stuck = max(night.stuck, now - last)
            if moved != seen:
                last, seen = now, moved
            if not night.struck and now - began >= at and night.state not in ENDS:
                night.struck = True
                ended, until = self._strike(fault), now + FULL_SECONDS
            if now >= until:
                ended()
                until = float("inf")
        ended()
        night.ended, night.seconds = datetime.now(UTC).isoformat(), time.monotonic() - began
        self._rest(night)
        return night

    def _trigger(self) -> str:
        """A run of the deployment, now."""
        deadline = time.monotonic() + MOST_SECONDS
        while time.monotonic() < deadline:
            deployment = self.deployment.prefect("/deployments/name/improve/improve")
            if deployment is not None:
                run = self.deployment.prefect(f"/deployments/{deployment['id']}/create_flow_run", {})
                if run is not None:
                    return str(run["id"])
            time.sleep(1)
        raise RuntimeError("Prefect takes no run")

    def _progress(self, night: Night) -> str:
        """What changes in the store when a round moves; "" while it does not answer."""
        try:
            newest = max(self.store.rows(Round), key=lambda r: r.number, default=None)
            if newest is not None and (newest.state == "running" or newest.started_at.isoformat() >= night.began):
                night.open = newest.number
            row = self.store.query(
                "SELECT (SELECT count(*) FROM trajectories) AS a, (SELECT count(*) FROM training_steps) AS b, "
                "(SELECT coalesce(sum(attempt), 0) FROM stages) AS c, "
                f"(SELECT count(*) FROM stages WHERE name NOT LIKE '{PROCESS}%') AS d"
            )
        except StoreError:
            return ""
        return " ".join(str(value) for value in row.iloc[0])

    def _strike(self, fault: str) -> Callable[[], object]:
        """Break it; what mends it again, where that is not at once."""
        if fault == KILL:
            self.kills += 1
            self.deployment.kill_worker(with_run=self.kills % 2 == 1)
        elif fault == PREFECT:
            self.deployment.restart("prefect")
        elif fault == POSTGRES:
            self.postgres.stop()
            self.postgres.start()
        elif fault == FULL:
            self.disk.fill()
            return self.disk.free
        return bool

    def _rest(self, night: Night) -> None:
        """Between two nights: what is there is seen, and how large the services are."""
        for _ in range(30):
            try:
                self.witness.look(self.store)
                night.sizes = self.deployment.sizes()
                return
            except (StoreError, OSError):  # it is being started again
                time.sleep(1)

    def ended_rounds(self) -> int:
        """Rounds that are done or failed."""
        return sum(r.state in ("done", "failed") for r in self.store.rows(Round))


def rolled_back(month: Month) -> Promise:
    """How long the gateway goes on serving what was rolled back."""
    name, before = "a rollback is seen at the gateway within 10 s", served(month)
    if not before:
        return Promise(name, False, "no release was live to roll back")
    done = month.deployment.trace("rollback")
    began = time.monotonic()
    while served(month) == before and time.monotonic() - began < MOST_SECONDS / 10:
        time.sleep(0.1)
    took = time.monotonic() - began
    kept = done.returncode == 0 and took <= MOST_TO_ROLL_BACK
    return Promise(name, kept, f"{took:.1f} s, release {before} -> {served(month)}")


def served(month: Month) -> Any:
    """The number of the release that the gateway serves (0: the base), None while it does not answer."""
    status = month.deployment.gateway()
    return None if status is None else status["release"]["number"]


def settled(month: Month) -> None:
    """What the receiver has not taken yet is sent, as the next notice would."""
    os.environ.update({k: v for k, v in month.deployment.environment.items() if k.startswith(("TRACE_", "MONTH_"))})
    deliver(load_settings())


def promises(month: Month, started: float, rounds: int, planned: Mapping[str, int]) -> list[Promise]:
    """Every promise, kept or broken."""
    back = rolled_back(month)
    settled(month)
    ended = month.ended_rounds()
    rows = sorted(month.store.rows(Round), key=lambda r: r.number)
    doctor = month.deployment.trace("doctor", "--json").stdout
    return [
        Promise("'trace-agent up' is healthy within 60 s", started <= MOST_TO_START, f"{started:.0f} s"),
        struck_promise(month.nights, planned),
        Promise("all rounds ended", ended >= rounds, f"{ended} in {len(month.nights)} nights"),
        rows_promise(month.store, month.witness, month.disk.folder / "mlflow.db"),
        stuck_promise(month.nights),
        *growth_promises(month.nights, [r.peak_gib for r in rows if r.state == "done" and r.peak_gib]),
        told_promise(month.nights, month.receiver.taken),
        back,
        doctor_promise(doctor),
        Promise("'trace-agent up' never stopped by itself", month.deployment.running, ""),
    ]


def run(month: Month, rounds: int, faults: dict[int, tuple[str, float]]) -> list[Promise]:
    """The whole month; the receiver is down for three nights, from a third of the rounds on."""
    started = month.deployment.start()
    print(f"all healthy after {started:.0f} s", flush=True)
    down, planned = rounds // 3, Counter(fault for fault, _ in faults.values())
    most = 2 * rounds + 2 * len(faults)
    signal.signal(signal.SIGINT, lambda *_: setattr(month, "stopped", True))
    while not month.stopped and (month.ended_rounds() < rounds or faults) and len(month.nights) < most:
        number = len(month.nights) + 1
        if number == down:
            month.receiver.stop()
        if number == down + 3:
            month.receiver.start()
        night = month.night(*faults.get(number, ("", 0.0)))
        if night.fault and not night.struck:
            put_off(faults, number)
        else:
            faults.pop(number, None)
        what = night.fault + ("" if night.struck or not night.fault else " (the night was over before)")
        print(
            f"night {number:>2}  round {night.open:>2}  {night.state:<9} {night.seconds:>5.0f} s  stood still "
            f"{night.stuck:>4.0f} s  {what}{'' if night.state == 'COMPLETED' else '  ' + night.message[:100]}",
            flush=True,
        )
    return promises(month, started, rounds, planned)


def show(found: list[Promise]) -> None:
    """The table of promises."""
    for promise in found:
        print(f"  {'kept' if promise.kept else 'BROKEN':<7} {promise.name}: {promise.figure}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder that is not there yet: logs and notices stay in it")
    options = parser.parse_args()
    folder = Path(options.keep or tempfile.mkdtemp(prefix="month-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    began, month = time.monotonic(), Month(folder)
    try:
        found = run(month, options.rounds, plan(options.rounds, options.kills, options.seed))
        show(found)
        if options.keep:  # its socket is none that could be copied
            shutil.copytree(month.disk.folder, folder / "left", symlinks=True, ignore=shutil.ignore_patterns("s"))
    finally:
        month.close()
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    minutes, load = (time.monotonic() - began) / 60, os.getloadavg()[2] / (os.cpu_count() or 1)
    print(f"\n{options.rounds} rounds, seed {options.seed}: {minutes:.0f} minutes, load of a core {load:.1f}")
    raise SystemExit(0 if all(promise.kept for promise in found) else 1)


if __name__ == "__main__":
    main()
