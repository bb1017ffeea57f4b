"""What `benchmarks.month` promises, and how each is checked from the store, MLflow, the webhook and the processes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from db import Store
from db.rows import PROCESS

MOST_STUCK = 120.0
# What a process may have grown by, from the median of the first quarter of nights to that of the last.
MOST_GROWTH, MOST_MIB, MOST_FILES = 0.15, 25.0, 8
VERDICTS = {"promoted", "refused", "underpowered"}
STOPPED = {"failed", "budget-reached"}
# What tells two rows of the same thing apart: nothing else may.
KEYS = {
    "rounds": "number",
    "stages": "round_id, name",
    "trajectories": "round_id, purpose, environment, task_id, seed, trial, policy_id, adapter_id, group_id",
    "training_steps": "adapter_id, step",
    "adapters": "round_id, capability_id",
    "releases": "target, number",
    "evaluations": "round_id, split, subject",
}
# Values of a stage's result that are ids of trajectories.
IDS = ("trajectories", "practised", "tried")


@dataclass
class Night:
    """A run of the deployment: what was done to it, how it ended in Prefect, and the longest time in which nothing of
    it moved. `open` is the number of the round that it worked on, 0 before it had one."""

    number: int
    fault: str = ""
    run: str = ""
    state: str = ""
    message: str = ""
    began: str = ""
    ended: str = ""
    seconds: float = 0.0
    stuck: float = 0.0
    struck: bool = False
    open: int = 0
    sizes: Mapping[str, tuple[float, int]] = field(default_factory=dict)


@dataclass
class Promise:
    """One line of the table."""

    name: str
    kept: bool
    figure: str


@dataclass
class Witness:
    """What the store was seen to hold: it has to be there at the end, as it was."""

    seen: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))

    def look(self, store: Store) -> None:
        """Remember every row whose outcome no later work may change."""
        for name, query in {
            "trajectory": "SELECT id, reward, success FROM trajectories WHERE error_boundary IS NULL",
            "training step": "SELECT adapter_id || ':' || step AS id, reward FROM training_steps",
            "stage": "SELECT id, attempt AS n FROM stages WHERE state IN ('done', 'skipped')",
            "round": "SELECT id, number FROM rounds",
            "release": "SELECT id, number FROM releases",
        }.items():
            for row in store.query(query).itertuples(index=False):
                self.seen[name].setdefault(str(row[0]), tuple(row[1:]))

    def lost(self, store: Store) -> list[str]:
        """What is no longer there, or no longer as it was."""
        now = Witness()
        now.look(store)
        return [
            f"{name} {key}"
            for name, rows in self.seen.items()
            for key, value in rows.items()
            if now.seen[name].get(key) != value
            # A step after the last checkpoint is done again, with the same number.
            and not (name == "training step" and key in now.seen[name])
        ]

    @property
    def rows(self) -> int:
        return sum(map(len, self.seen.values()))


def rows_promise(store: Store, witness: Witness, registry: Path) -> Promise:
    """No row is lost (each that was seen is there; what a stage says it played is there; stages of ended rounds are
    final; numbers have no gap) and none is there twice (by what it is of, in the store and in MLflow)."""
    wrong = [f"{what} was lost" for what in witness.lost(store)]
    wrong += [f"{table}: {n} twice by ({keys})" for table, keys in KEYS.items() if (n := _twice(store, table, keys))]
    results = store.query("SELECT result FROM stages WHERE result IS NOT NULL")["result"]
    named = {i for result in results for i in _ids(json.loads(result) if isinstance(result, str) else result)}
    known = set(store.query("SELECT id FROM trajectories")["id"])
    wrong += [f"trajectory {i} is in a stage's result and not stored" for i in sorted(named - known)[:5]]
    unfinished = store.query(
        "SELECT r.number, s.name FROM stages s JOIN rounds r ON r.id = s.round_id "
        f"WHERE r.state = 'done' AND s.state NOT IN ('done', 'skipped') AND s.name NOT LIKE '{PROCESS}%'"
    )
    wrong += [f"stage {row.name} of round {row.number} is not final" for row in unfinished.itertuples(index=False)]
    for what, query in {
        "rounds": "SELECT count(*) AS n, max(number) AS last FROM rounds",
        "steps": "SELECT count(*) AS n, max(step) AS last FROM training_steps GROUP BY adapter_id",
    }.items():
        gaps = [(row.n, row.last) for row in store.query(query).itertuples(index=False) if row.n != row.last]
        wrong += [f"{what}: {n} rows, the last is number {last}" for n, last in gaps]
    wrong += doubled_in_mlflow(registry)
    counts = ", ".join(f"{_count(store, table)} {table}" for table in ("trajectories", "stages", "training_steps"))
    return Promise("no lost or doubled row", not wrong, "; ".join(wrong[:6]) or f"{counts}; {witness.rows} seen before")


def doubled_in_mlflow(registry: Path) -> list[str]:
    """Runs of one key, and versions of one content in one model."""
    queries = {
        "runs of key": "SELECT value, count(*) FROM tags WHERE key = 'trace.key' GROUP BY value HAVING count(*) > 1",
        "versions of": "SELECT name || ' ' || value, count(*) FROM model_version_tags WHERE key = 'sha256' "
        "GROUP BY name, value HAVING count(*) > 1",
    }
    with closing(sqlite3.connect(f"file:{registry}?mode=ro", uri=True)) as opened:
        return [f"MLflow: {n} {what} {key}" for what, q in queries.items() for key, n in opened.execute(q)]


def struck_promise(nights: Sequence[Night], planned: Mapping[str, int]) -> Promise:
    """Everything that was to break a night broke one."""
    struck = Counter(night.fault for night in nights if night.struck)
    figure = ", ".join(f"{struck[fault]} of {wanted} x {fault}" for fault, wanted in sorted(planned.items()))
    return Promise("what was to happen happened", struck == Counter(planned), figure)


def stuck_promise(nights: Sequence[Night]) -> Promise:
    """No run stands still for longer than `MOST_STUCK` seconds, the wait for its end after a kill included."""
    worst = max(nights, key=lambda night: night.stuck)
    figure = f"at most {worst.stuck:.0f} s (night {worst.number}{': ' if worst.fault else ''}{worst.fault})"
    return Promise(f"no run stuck for more than {MOST_STUCK:g} s", worst.stuck <= MOST_STUCK, figure)


def growth_promises(nights: Sequence[Night], peaks: Sequence[float]) -> list[Promise]:
    """Memory and open files of each service, and the peak memory of the rounds, first quarter against last."""
    found = []
    for name in sorted({name for night in nights for name in night.sizes}):
        sizes = [night.sizes[name] for night in nights if name in night.sizes]
        memory, files = _quarters([s[0] for s in sizes]), _quarters([float(s[1]) for s in sizes])
        kept = memory[1] <= memory[0] * (1 + MOST_GROWTH) + MOST_MIB and files[1] <= files[0] + MOST_FILES
        figure = f"{memory[0]:.0f} -> {memory[1]:.0f} MiB, {files[0]:.0f} -> {files[1]:.0f} files"
        found.append(Promise(f"flat: {name}", kept, figure))
    first, last = _quarters([1024 * peak for peak in peaks])
    flat = last <= first * (1 + MOST_GROWTH) + MOST_MIB
    return [*found, Promise("flat: a round's process at its peak", flat, f"{first:.0f} -> {last:.0f} MiB")]


def told_promise(nights: Sequence[Night], notices: Sequence[Mapping[str, Any]]) -> Promise:
    """Of every run the receiver has been told how it ended: the gate's verdict; why it was stopped; or, where its
    process was killed, by the next run that it died."""
    wrong = []
    kinds = Counter((n["event"].removeprefix("trace."), n["details"].get("round")) for n in notices)
    deaths = {run for n in notices if n["event"] == "trace.died" for run in n["details"].get("runs", ())}
    for night in nights:
        if night.state == "COMPLETED" and not any(kinds[kind, night.open] for kind in VERDICTS):
            wrong.append(f"no verdict of round {night.open} (night {night.number})")
        if night.state == "FAILED" and not any(
            n["event"].removeprefix("trace.") in STOPPED and night.began <= n["at"] <= night.ended for n in notices
        ):
            wrong.append(f"no notice of why night {night.number} failed: {night.message[:120]}")
    for night in nights[:-1]:  # after the last one there is none that could tell
        if night.state == "CRASHED" and night.run not in deaths:
            wrong.append(f"nobody was told that night {night.number} died")
    every = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(k for k, _ in kinds.elements()).items()))
    return Promise("every night's outcome told", not wrong, "; ".join(wrong[:6]) or every)


def doctor_promise(said: str) -> Promise:
    """The doctor, by what its `--json` said, finds nothing at the end but that the disk is small: this one's is, on
    purpose."""
    try:
        found = json.loads(said)
    except ValueError:
        return Promise("the doctor finds nothing", False, f"it said {said[-200:]!r}")
    wrong = [f"{f['level']} {f['check']}: {f['said']}" for f in found if f["level"] != "ok" and f["check"] != "disk"]
    return Promise(
        "the doctor finds nothing", not wrong, "; ".join(wrong) or f"{len(found)} checks, a small disk aside"
    )


def _twice(store: Store, table: str, keys: str) -> int:
    query = f"SELECT count(*) AS n FROM (SELECT 1 FROM {table} GROUP BY {keys} HAVING count(*) > 1) AS twice"
    return int(store.query(query)["n"].iloc[0])


def _count(store: Store, table: str) -> int:
    return int(store.query(f"SELECT count(*) AS n FROM {table}")["n"].iloc[0])


def _ids(value: Any) -> list[str]:
    """Ids of trajectories anywhere in a stage's result."""
    if isinstance(value, list):
        return [i for part in value for i in _ids(part)]
    if not isinstance(value, Mapping):
        return []
    found: list[str] = []
    for name, part in value.items():
        parts = part.values() if name == "alone_ids" and isinstance(part, Mapping) else [part]
        if name.endswith("_ids") or name in IDS:
            found += [i for ids in parts if isinstance(ids, list) for i in ids]
        else:
            found += _ids(part)
    return found


def _quarters(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and the last quarter."""
    size = max(1, len(values) // 4)
    return (median(values[:size]), median(values[-size:])) if values else (0.0, 0.0)
