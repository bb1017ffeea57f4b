"""The runs of a round's parts in MLflow, under its own: diagnosis, each training, the gate, the test split. Each has
the tasks that it used as a dataset, its figures, and, where sides are compared, a table task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import pandas as pd

from db import Round, StageRow, Store, VerdictRow
from models.adapters.registry import Registry
from models.adapters.runs import RunLog
from tasks.reporting.history import WHOLE
from tasks.round.registry import run_name
from tasks.round.results import (
    CalibrateResult,
    ChallengeResult,
    ContrastResult,
    EvaluateResult,
    RegisterResult,
    RolloutResult,
    SelectResult,
    TestResult,
    TrainResult,
)
from tasks.round.stored import StoredRound

# Rows of a table: MLflow's page shows no more, and all outcomes are in the database.
MOST_ROWS = 1000
SIDES = {"base": "base", "live": "live before", "routed": "after"}


def log_parts(registry: Registry, stored: StoredRound, parent: str) -> None:
    """Log every part that the round came to. Done again it changes nothing."""
    _diagnosis(registry, stored, parent)
    for capability in _trained(stored):
        _training(registry, stored, capability)
    _gate(registry, stored, parent)
    _test(registry, stored, parent)


def _diagnosis(registry: Registry, stored: StoredRound, parent: str) -> None:
    rolled, found = stored.found(RolloutResult), stored.found(ContrastResult)
    if rolled is None:
        return
    log = _part(registry, stored, parent, "diagnosis", ("rollout", "contrast", "select"))
    chosen = stored.found(SelectResult)
    metrics = {"success": rolled.success, "lost": rolled.lost, "release": rolled.release}
    if found is not None:
        metrics |= {"candidates": len(found.candidates), "labels": found.labels}
        metrics |= {} if found.kappa is None else {"kappa": found.kappa}
    if chosen is not None:
        metrics["selected"] = len(chosen.selected)
    log.metrics(metrics)
    log.dataset(_tasks(stored.store, rolled.trajectories), f"{stored.round.target}-diagnosis", "diagnosis")
    registry.end_run(log.run, ended=_ended(stored, ("rollout", "contrast", "select")))


def _training(registry: Registry, stored: StoredRound, capability: str) -> None:
    """What a training's run lacks yet: how its environment was calibrated, its scenarios, and its end where no adapter
    was registered."""
    trained = stored.result(TrainResult, capability)
    log = RunLog(registry, trained.run)
    calibrated = stored.found(CalibrateResult, capability)
    if calibrated is not None and calibrated.played:
        names = ("mean_reward", "success_rate", "std_reward", "informative", "hinted")
        figures = {name: getattr(calibrated, name) for name in names}
        log.metrics({f"calibrate/{name}": value for name, value in figures.items() if value is not None})
    frame = stored.store.trajectory_frame(
        stored.round.id, purpose="training", adapter_id=trained.adapter, columns=["id", "task_id", "family"]
    )
    if not frame.empty:
        log.dataset(_distinct(frame), f"{capability}-scenarios", "training")
    failed = bool(trained.verdict) or stored.goes_on(RegisterResult, capability) is False
    registry.end_run(trained.run, failed=failed, ended=_ended(stored, ("train", "register"), capability))


def _gate(registry: Registry, stored: StoredRound, parent: str) -> None:
    challenged, evaluated = stored.found(ChallengeResult), stored.found(EvaluateResult)
    if challenged is None or challenged.skipped:
        return
    stages = ("challenge", "route", "evaluate", "gate")
    log = _part(registry, stored, parent, "gate", stages)
    metrics: dict[str, float] = {"look": challenged.look, "alpha": challenged.alpha, "passed": len(challenged.passed)}
    whole = stored.store.row(VerdictRow, round_id=stored.round.id, subject=WHOLE)
    for name in ("points", "p", "mde"):
        value = getattr(whole, name) if whole else None
        metrics |= {} if value is None else {f"gate/{name}": value}
    log.metrics(metrics)
    log.params(
        {"verdict": whole.verdict if whole else "no candidate", "passed": ", ".join(challenged.passed) or "none"}
    )
    log.dataset(_tasks(stored.store, challenged.live_ids), f"{stored.round.target}-validation", "validation")
    sides: Mapping[str, Sequence[str]] = {"live before": challenged.live_ids, **challenged.alone_ids}
    if evaluated is not None and not evaluated.skipped:
        candidate = [*evaluated.routed_ids, *evaluated.further_routed_ids]
        sides = {"live before": challenged.live_ids, "candidate": candidate, **challenged.alone_ids}
    log.table(outcome_table(stored.store, sides), "validation.json")
    registry.end_run(log.run, ended=_ended(stored, stages))


def _test(registry: Registry, stored: StoredRound, parent: str) -> None:
    tested = stored.found(TestResult)
    if tested is None or not tested.routed_ids:
        return
    log = _part(registry, stored, parent, "test", ("test",))
    metrics: dict[str, float] = {"looks": tested.looks, "release": tested.release}
    for name in (*SIDES, "noop"):
        rate = getattr(tested, name)
        if rate is not None:
            metrics |= {f"test/{name}": rate.success, f"test/{name}_low": rate.low, f"test/{name}_high": rate.high}
    log.metrics(metrics)
    log.dataset(_tasks(stored.store, tested.base_ids), f"{stored.round.target}-test", "test")
    ids = tested.sides()
    log.table(outcome_table(stored.store, {name: ids[side] for side, name in SIDES.items() if ids[side]}), "test.json")
    registry.end_run(log.run, ended=_ended(stored, ("test",)))


def outcome_table(store: Store, sides: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """One row a task and trial: its family, and success of each side (None where it was not played, or was lost);
    tasks on which sides differ come first, at most `MOST_ROWS`."""
    wanted = sorted({i for ids in sides.values() for i in ids})
    columns = ["id", "task_id", "family", "trial", "success"]
    frame = store.trajectory_frame(None, id=wanted, columns=columns).set_index("id")
    rows: dict[tuple[str, int], dict[str, object]] = {}
    for side, ids in sides.items():
        for r in frame.loc[frame.index.intersection(list(ids))].itertuples():
            key = str(r.task_id), int(r.trial)
            known = rows.setdefault(key, {"task": key[0], "family": r.family, "trial": key[1]} | dict.fromkeys(sides))
            known[side] = None if pd.isna(r.success) else bool(r.success)
    ordered = sorted(
        rows.values(), key=lambda row: (len({str(row[s]) for s in sides} - {"None"}) < 2, str(row["task"]))
    )
    return pd.DataFrame(ordered[:MOST_ROWS], columns=["task", "family", "trial", *sides])


def _part(registry: Registry, stored: StoredRound, parent: str, part: str, stages: Sequence[str]) -> RunLog:
    this: Round = stored.round
    began = min((at for s in stages if (at := _times(stored, s)[0])), default=None)
    run = registry.start_run(
        f"{this.id}-{part}-part", {"round": this.id, "kind": part}, run_name(this.target, this.number, part), parent,
        _milliseconds(began),
    )  # fmt: skip
    return RunLog(registry, run)


def _ended(stored: StoredRound, stages: Sequence[str], of: str = "") -> int | None:
    return _milliseconds(max((at for s in stages if (at := _times(stored, s, of)[1])), default=None))


def _times(stored: StoredRound, stage: str, of: str = "") -> tuple[datetime | None, datetime | None]:
    name = f"{stage}:{of}" if of else stage
    row = next(iter(stored.store.rows(StageRow, round_id=stored.round.id, name=name)), None)
    return (row.started_at, row.finished_at) if row else (None, None)


def _milliseconds(at: datetime | None) -> int | None:
    """Milliseconds since 1970; stored times without a zone are UTC."""
    if at is None:
        return None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _trained(stored: StoredRound) -> list[str]:
    chosen = stored.found(SelectResult)
    found = {c: stored.found(TrainResult, c) for c in (chosen.selected if chosen else [])}
    return [c for c, trained in found.items() if trained and trained.run]


def _tasks(store: Store, ids: Sequence[str]) -> pd.DataFrame:
    return _distinct(store.trajectory_frame(None, id=list(ids), columns=["id", "task_id", "family"]))


def _distinct(frame: pd.DataFrame) -> pd.DataFrame:
    """Tasks with their families, each once, in order."""
    tasks = frame[["task_id", "family"]].drop_duplicates().sort_values("task_id", ignore_index=True)
    return tasks.rename(columns={"task_id": "task"})
