"""Outcomes to compare, whoever played them: a file of anybody's, or what the store holds of an evaluation, an adapter
version, or a release.

Each becomes one frame [task, family, trial, success], success NaN where the episode was lost. What cannot be read
without guessing is refused with the place and the value.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from db import AdapterRow, Round, RouteRow, SpendRow, StageRow, Store
from db.values.text import clean_text
from errors import ConfigurationError, StoreError
from tasks.releases.lookup import live_around, release_numbered
from tasks.round.registry import registry_name

COLUMNS = ("task", "trial", "success")
FILES = (".csv", ".jsonl")
TRUTH = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0, "": np.nan}
# The bare base, as a release.
BASE = 0
# Evaluations that are named at most where a release's own episodes are missing.
NAMED = 5
# Evaluations that are asked at most which release they played, newest first.
MOST_TOLD = 1000
RELEASE = "release@"


@dataclass(frozen=True)
class Outcomes:
    """Outcomes under the name that they were asked for; target and data hash are "" for a file, which has none.
    `validation` are the validation tasks of a release or an adapter: the gate chose by them. `routed` are tasks that an
    adapter played because a router chose it for them. `older` are states of the target's data that it was played on as
    well, and that are left out."""

    name: str
    frame: pd.DataFrame
    target: str = ""
    data_hash: str = ""
    validation: frozenset[str] = frozenset()
    routed: frozenset[str] = frozenset()
    older: tuple[str, ...] = ()


def is_file(what: str) -> bool:
    """Whether a name means a file: by its ending, or because there is one."""
    return Path(what).suffix.lower() in FILES or Path(what).is_file()


def read_outcomes(path: Path) -> Outcomes:
    """Outcomes from a CSV file with a header, or from JSON lines: `task`, `trial`, `success` (true or false, 1 or 0;
    empty or null for an episode that was lost) and optionally `family`. `ConfigurationError` with file, line and value
    for everything else, and for a (task, trial) that occurs twice."""
    seen: dict[tuple[str, str], int] = {}
    families: dict[str, str] = {}
    rows = []
    for line, record in _records(path):
        where = f"{path}, line {line}"
        missing = [c for c in COLUMNS if c not in record]
        if missing:
            have = ", ".join(map(str, record)) or "none"
            raise ConfigurationError(
                f"{where}: no column {', '.join(missing)} (there are: {have}); outcomes need {', '.join(COLUMNS)}, and "
                "may have family"
            )
        task, trial, family = (_text(record.get(c), c, where) for c in ("task", "trial", "family"))
        if not task or not trial:
            raise ConfigurationError(f"{where}: {'task' if not task else 'trial'} is empty; give every episode both")
        if (task, trial) in seen:
            raise ConfigurationError(
                f"{where}: task {task!r} trial {trial!r} stands in line {seen[task, trial]} already; give each once"
            )
        if families.setdefault(task, family) != family:
            raise ConfigurationError(
                f"{where}: task {task!r} is of family {family!r} here and of {families[task]!r} above; give it one"
            )
        seen[task, trial] = line
        rows.append((task, family, trial, _success(record["success"], where)))
    if not rows:
        raise ConfigurationError(f"{path} holds no outcome; give one episode a line")
    return Outcomes(str(path), pd.DataFrame(rows, columns=["task", "family", "trial", "success"]))


def outcomes_of(store: Store, what: str, target: str, data: str = "") -> Outcomes:
    """Stored outcomes of `release@N` (or the number alone; 0 is the bare base), of an adapter version
    (`capability@vN`), or of an evaluation (its id or the beginning of it).

    `target` is that of releases and adapters, `data` the state of its data where there are several. A trial is told by
    its seed and number. `ConfigurationError` for a name
    that means none of these or several, `StoreError` for what is not stored or has no outcome."""
    which, of = _named(store, what, target)
    return _stored(store, what, which, of, data)


def is_evaluation(what: str) -> bool:
    """Whether a name is the id of an evaluation, or the beginning of one, which says itself what target it is of."""
    return bool(re.fullmatch(r"[0-9a-f]{6,}", what))


def common_data(store: Store, names: Sequence[str], target: str) -> str:
    """The newest state of the target's data that all of these were played on; "" where there is none."""
    columns = ["split", "target", "data_hash"]
    states = [set(_rows(store, *_named(store, what, target), columns)["data_hash"]) for what in names]
    newest = {r.data_hash: r.number for r in sorted(store.rows(Round, target=target), key=lambda r: r.number)}
    return max(set.intersection(*states), key=lambda state: newest.get(state, 0), default="")


def _named(store: Store, what: str, target: str) -> tuple[dict[str, Any], str]:
    """Which columns of trajectories have which values for a name, and the target of its episodes ("": any)."""
    if found := re.fullmatch(r"(?:release@)?(\d{1,5})", what):
        return {"id": release_episodes(store, target, int(found[1]))}, target
    if found := re.fullmatch(r"(.+)@v(\d+)(?:-[0-9a-f]+)?", what):
        return {"adapter_id": _adapter(store, target, found[1], found[2]).id}, target
    if is_evaluation(what):
        return {"group_id": _evaluation(store, what)}, ""
    raise ConfigurationError(
        f"{what!r} cannot be compared; give release@N (or N), capability@vN, the id of an evaluation, or "
        f"a file of outcomes ({' or '.join(FILES)})"
    )


def release_episodes(store: Store, target: str, number: int) -> list[str]:
    """Ids of the evaluation episodes of a release, from the results of every round that played it: as what was live
    before the round, as the candidate that the round's gate judged, and as what was live after it. 0 is the bare base,
    which every round plays."""
    release = release_numbered(store, target, number) if number != BASE else None
    rounds = store.rows(Round, target=target)
    around, ids = live_around(store, rounds), dict[str, None]()
    for at in rounds:
        results = {r.name: r.result or {} for r in store.rows(StageRow, round_id=at.id)}
        challenged, evaluated, tested = (results.get(name, {}) for name in ("challenge", "evaluate", "test"))
        played = [r.get("live_ids") for r in (challenged, evaluated, tested) if around[at.id][0] == number]
        if release is None:
            played += [evaluated.get("base_ids"), tested.get("base_ids")]
        else:
            # Of two candidates of one round the first's router was fitted again: the episodes are those of the second.
            judged = release.round_id == at.id and evaluated.get("candidate") in (None, "", release.id)
            played += [evaluated.get("routed_ids")] if judged else []
            played += [tested.get("routed_ids")] if tested.get("release") == number else []
        ids |= dict.fromkeys(i for part in played for i in part or ())
    return list(ids)


def _adapter(store: Store, target: str, capability: str, version: str) -> AdapterRow:
    model = f"trace-{registry_name(target)}-{capability}"
    known = store.rows(AdapterRow, registered_model=model)
    for row in known:
        if str(row.registered_version) == version:
            return row
    have = ", ".join(f"v{row.registered_version}" for row in known) or "none"
    raise StoreError(f"target {target!r} has no {capability}@v{version}; stored versions of {capability!r}: {have}")


def _routed(store: Store, adapter_id: str, rows: pd.DataFrame, target: str) -> frozenset[str]:
    """Tasks of an adapter's episodes that it played because a router chose it: those of a decision, without those that
    it played alone against what was live, which a router may have chosen it for as well."""
    chosen = {r.trajectory_id for r in store.rows(RouteRow, adapter_id=adapter_id)}
    if not chosen:
        return frozenset()
    rounds = [r.id for r in store.rows(Round, target=target)]
    played = [(r.result or {}).get("alone_ids") or {} for r in store.rows(StageRow, round_id=rounds, name="challenge")]
    chosen -= {i for by_capability in played for ids in by_capability.values() for i in ids}
    return frozenset(rows["task_id"][rows["id"].isin(chosen)])


def _not_played(store: Store, what: str, which: Mapping[str, Any], target: str) -> str:
    """What is missing, and where it may be all the same: in an evaluation, by its id. Those of earlier versions do not
    say which release they played."""
    said = f"nothing is stored of {what} on tasks of {target or 'a target'}; evaluate it first"
    if "id" not in which:
        return said
    found = store.query(
        "SELECT group_id, MAX(created_at) AS at FROM trajectories WHERE purpose = 'evaluation' AND round_id IS NULL "
        "AND target = :target AND group_id IS NOT NULL GROUP BY group_id ORDER BY at DESC, group_id",
        target=target,
    )["group_id"].tolist()
    if not found:
        return said
    played = played_releases(store, found[:MOST_TOLD])
    mine = [i for i in found if str(played.get(i)) == what.removeprefix(RELEASE)]
    if mine:
        return (
            f"no round has played {what} on tasks of {target}, and 'trace-agent evaluate' has: give the id of that "
            f"evaluation ({', '.join(mine[:NAMED])})"
        )
    ids = ", ".join(map(str, found[:NAMED])) + (" and others" if len(found) > NAMED else "")
    return (
        f"no round has played {what} on tasks of {target}; if 'trace-agent evaluate' has, give the id that it printed "
        f"(the newest stored evaluations are {ids}), else evaluate it first"
    )


def evaluation_stage(identity: str) -> str:
    """The name under which an evaluation's spending is stored."""
    return f"evaluation:{identity}"


def release_marker(identity: str, number: int) -> SpendRow:
    """What says that an evaluation played a release (0: the bare base): that it spent nothing on a model so called."""
    return SpendRow(id=f"{identity}-release", stage=evaluation_stage(identity), model=f"{RELEASE}{number}")


def played_releases(store: Store, identities: Sequence[str]) -> dict[str, int]:
    """The number of the release that each of these evaluations played, of those that say so: since they store it, and
    where it was a release."""
    stages = {evaluation_stage(identity): identity for identity in identities}
    rows = store.rows(SpendRow, stage=list(stages)) if stages else []
    told = {stages[r.stage]: r.model.removeprefix(RELEASE) for r in rows if r.model.startswith(RELEASE)}
    return {identity: int(number) for identity, number in told.items() if number.isdecimal()}


def _evaluation(store: Store, beginning: str) -> str:
    found = store.query(
        "SELECT DISTINCT group_id FROM trajectories WHERE purpose = 'evaluation' AND round_id IS NULL "
        "AND group_id LIKE :beginning",
        beginning=f"{beginning}%",
    )["group_id"].tolist()
    if len(found) != 1:
        raise StoreError(
            f"{len(found)} stored evaluations begin with {beginning!r}; 'trace-agent evaluate --json' prints their ids"
        )
    return str(found[0])


def _rows(store: Store, which: Mapping[str, Any], target: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Evaluation episodes on the target's own tasks (`which` are columns of trajectories)."""
    parts = [{"id": ids[i : i + 20_000]} for ids in [which["id"]] for i in range(0, len(ids), 20_000)] \
        if "id" in which else [which]  # fmt: skip
    frames = [store.trajectory_frame(None, purpose="evaluation", columns=columns, **part) for part in parts]
    rows = pd.concat(frames) if frames else pd.DataFrame(columns=["split", "target", "data_hash"])
    return rows[(rows["split"] != "generated") & (rows["target"].isin([target]) if target else True)]


def _stored(store: Store, what: str, which: Mapping[str, Any], target: str, state: str) -> Outcomes:
    """Outcomes on one state of the target's data, which has to be named where there are several."""
    rows = _rows(store, which, target)
    if rows.empty:
        raise StoreError(_not_played(store, what, which, target))
    data = sorted(rows["data_hash"].unique())
    older = tuple(found for found in data if found != state) if state in data else ()
    if older:
        rows, data = rows[rows["data_hash"] == state], [state]
    if len(data) > 1:
        raise StoreError(
            f"{what} was played on {len(data)} states of the target's data ({', '.join(data)}), which are not "
            "comparable; play both sides on one (trace-agent evaluate) and compare these evaluations"
        )
    lost = rows["error_boundary"].notna()
    frame = pd.DataFrame(
        {
            "task": rows["task_id"],
            "family": rows["family"],
            "trial": rows["seed"].astype(str) + "/" + rows["trial"].astype(str),
            "success": rows["success"].where(~lost).astype(float),
        }
    ).reset_index(drop=True)
    # What was lost and then played by another adapter has one result.
    again = frame.sort_values("success", kind="stable").duplicated(["task", "trial"])
    frame = frame[~again | frame["success"].notna()].reset_index(drop=True)
    twice = frame[frame.duplicated(["task", "trial"])]
    if len(twice):
        task, trial = twice[["task", "trial"]].iloc[0]
        hint = "play it again with --fresh" if "group_id" in which else "compare evaluations"
        raise StoreError(f"{what} has task {task!r} trial {trial} twice under different policies; {hint}")
    # A single evaluation was asked for by name, whatever its split.
    gated = rows["split"].eq("validation") & ("group_id" not in which)
    routed = _routed(store, which["adapter_id"], rows, target) if "adapter_id" in which else frozenset[str]()
    of, validation = str(rows["target"].iloc[0]), frozenset(rows["task_id"][gated])
    played = played_releases(store, [which["group_id"]]) if "group_id" in which else {}
    name = f"{what} ({RELEASE}{played[which['group_id']]})" if played else what
    return Outcomes(name, frame, of, data[0], validation, routed, older)


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, record) of a file."""
    kind = path.suffix.lower()
    if kind not in FILES:
        raise ConfigurationError(f"{path} is neither {' nor '.join(FILES)}; name the file after what it holds")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem}; give a UTF-8 file of outcomes") from problem
    if kind == ".csv":
        yield from _csv_records(path, text)
        return
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold what `splitlines` takes for a line's end
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ConfigurationError(f"{path}, line {number}: no JSON ({problem}); write an object a line") from problem
        if not isinstance(record, dict):
            raise ConfigurationError(
                f"{path}, line {number}: {line[:40]!r} is not a JSON object; write an object a line"
            )
        yield number, record


def _csv_records(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = list(reader.fieldnames or ())
        if len(set(header)) < len(header):
            raise ConfigurationError(f"{path}, line 1: a column twice ({', '.join(header)}); give each once")
        for record in reader:
            # Of a line with more fields than the header has, they stand under None; with fewer, they are None.
            if None in record or None in record.values():
                raise ConfigurationError(
                    f"{path}, line {reader.line_num}: not the {len(header)} fields of the header; separate by commas"
                )
            yield reader.line_num, record
    except csv.Error as problem:
        raise ConfigurationError(f"{path}, line {reader.line_num}: {problem}; write it as plain CSV") from problem


def _text(value: Any, column: str, where: str) -> str:
    if isinstance(value, bool | float | list | dict):
        raise ConfigurationError(f"{where}: {column} is {value!r}; give a text or a whole number")
    # As the store keeps it, so that a task has one name in both.
    return "" if value is None else clean_text(str(value).strip())


def _success(value: Any, where: str) -> float:
    known = TRUTH.get("" if value is None else str(value).strip().lower())
    if known is None:
        raise ConfigurationError(
            f"{where}: success is {value!r}; write true or false (or 1 or 0), and nothing for an episode that was lost"
        )
    return known


def families_of(sides: Sequence[Outcomes]) -> dict[str, str]:
    """The family of each task, "" where no side names one. `ConfigurationError` when two sides name different ones."""
    families: dict[str, str] = {}
    for side in sides:
        for task, family in side.frame[["task", "family"]].drop_duplicates().itertuples(index=False):
            known = families.setdefault(task, family) or family
            if family and known != family:
                raise ConfigurationError(
                    f"task {task!r} is of family {known!r} in {sides[0].name} and of {family!r} in {side.name}; "
                    "these are not the same tasks"
                )
            families[task] = known
    return families
