"""Selection from published labelling runs: `trace-agent select --candidates FILE --runs FOLDER`.

Candidates are {"candidates": [{"name", "definition" or "description", "example_trajectories"}]}. Each file of the
folder is one run: {"attempt": 1, "totals": {"total_failed", "total_passed"}, "labels": {NAME: {"lacking_failed": [ids],
"present_failed", "na_failed", "lacking_passed", "present_passed", "na_passed"}}}. A run may lack a capability: then it
counts as not passed. Anything else that does not partition the trajectories is refused with the file and the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from errors import LabelError
from tasks.mining.agreement import agreement
from tasks.mining.labels import LABELS
from tasks.mining.selection import CapabilitySelection, select

_CELLS = tuple((f"{label.lower()}_{outcome}", label, outcome) for outcome in ("failed", "passed") for label in LABELS)


@dataclass(frozen=True)
class PublishedSelection:
    """The selected capabilities in order of mean Delta, the others with their reason, and the agreement of the runs
    (None where it is undefined): `kappa` over the `complete` capabilities that every run labels. Standard deviations
    are of the population of runs."""

    selected: tuple[CapabilitySelection, ...]
    rejected: tuple[CapabilitySelection, ...]
    runs: int
    kappa: float | None
    complete: int
    kappa_by_capability: Mapping[str, float | None]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "selected": [self._row(row) for row in self.selected],
            "rejected": [self._row(row) | {"reason": row.reason} for row in self.rejected],
            "kappa": self.kappa,
        }

    def table(self) -> list[str]:
        """Lines to print: a row per capability, the evidence of the selected ones, the reason of the others."""
        width = max((len(row.name) for row in (*self.selected, *self.rejected)), default=4)
        head = f"{'capability':<{width}}  {'Cov':>13}  {'Delta':>14}  {'runs':>7}  {'kappa':>6}"
        lines = [head, "-" * len(head)]
        for row in (*self.selected, *self.rejected):
            agreed = self.kappa_by_capability[row.name]
            means = f"{row.mean_cov:.3f} ± {row.std_cov:.3f}  {row.mean_delta:+.3f} ± {row.std_delta:.3f}"
            lines.append(
                f"{row.name:<{width}}  {means}"
                f"  {row.runs_passed:>3}/{self.runs:<3}  {'n/a' if agreed is None else f'{agreed:.3f}':>6}"
            )
            if row.selected:
                lines.append(
                    "  evidence: " + ", ".join(f"{trajectory} ({votes})" for trajectory, votes in row.evidence)
                )
            else:
                lines.append(f"  not selected: {row.reason}")
        kappa = "n/a" if self.kappa is None else f"{self.kappa:.3f}"
        total = len(self.selected) + len(self.rejected)
        lines.append(
            f"{len(self.selected)} selected of {total}; Fleiss' kappa over the capabilities that every run labels "
            f"({self.complete} of {total}) {kappa}"
        )
        return lines

    def _row(self, row: CapabilitySelection) -> dict[str, Any]:
        return {
            "name": row.name,
            "mean_cov": row.mean_cov,
            "std_cov": row.std_cov,
            "mean_delta": row.mean_delta,
            "std_delta": row.std_delta,
            "runs_passed": row.runs_passed,
            "runs": self.runs,
            "kappa": self.kappa_by_capability[row.name],
            "evidence": [{"id": trajectory, "votes": votes} for trajectory, votes in row.evidence],
        }


def published_selection(
    candidates_file: Path, runs_folder: Path, *, rho: float = 0.10, delta: float = 0.20, k: int = 8
) -> PublishedSelection:
    """Read, check, and select. N is the number of runs in the folder. Raises `LabelError` with what is wrong."""
    names = read_candidates(candidates_file)
    paths = sorted(runs_folder.glob("*.json"))
    if not paths:
        raise LabelError(f"{runs_folder} holds no labelling run (*.json)")
    attempts: dict[Any, Path] = {}
    frames = []
    for path in paths:
        attempt, frame = read_run(path, names)
        if attempt in attempts:
            raise LabelError(f"{path.name} and {attempts[attempt].name} both are attempt {attempt}; give each run once")
        attempts[attempt] = path
        frames.append(frame)
    _check_same_trajectories(list(attempts.values()), frames)
    if len(paths) < k:
        raise LabelError(
            f"{runs_folder} holds {len(paths)} labelling runs, and a capability has to pass in {k}: nothing could be "
            f"selected; give more runs, or ask for fewer (--required {max(1, round(0.8 * len(paths)))})"
        )
    labels = pd.concat(frames, ignore_index=True)
    rows = select(labels, rho=rho, delta=delta, k=k, n=len(paths))
    never = sorted(set(names) - {row.name for row in rows})
    missing = tuple(
        CapabilitySelection(name, False, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), "No run labels it.") for name in never
    )
    overall, by_name = agreement(labels)
    complete = int((labels.groupby("capability")["run"].nunique() == len(paths)).sum())
    return PublishedSelection(
        tuple(row for row in rows if row.selected),
        (*(row for row in rows if not row.selected), *missing),
        len(paths),
        overall,
        complete,
        by_name | dict.fromkeys(never),
    )


def read_candidates(path: Path) -> dict[str, str]:
    """Name -> definition, in the order of the file."""
    found = _read(path)
    rows = found.get("candidates") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows:
        raise LabelError(f'{path.name}: it must be {{"candidates": [{{"name", ...}}, ...]}} with at least one')
    names: dict[str, str] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not row["name"]:
            raise LabelError(f"{path.name}: a candidate has no name: {str(row)[:120]}")
        if row["name"] in names:
            raise LabelError(f"{path.name}: the candidate {row['name']!r} stands twice")
        names[row["name"]] = str(row.get("definition") or row.get("description") or "")
    return names


def read_run(path: Path, names: Mapping[str, str]) -> tuple[Any, pd.DataFrame]:
    """(attempt, labels as `tasks.mining.selection.select` takes them) of one file."""
    found = _read(path)
    if not isinstance(found, dict) or not isinstance(found.get("labels"), dict) or not found["labels"]:
        raise LabelError(f'{path.name}: it must be {{"attempt", "totals", "labels": {{NAME: ...}}}} with labels')
    attempt, totals = found.get("attempt"), found.get("totals")
    if isinstance(attempt, bool) or not isinstance(attempt, int):
        raise LabelError(f"{path.name}: attempt is {attempt!r}, not a number")
    total = {}
    for outcome in ("failed", "passed"):
        value = totals.get(f"total_{outcome}") if isinstance(totals, dict) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise LabelError(f"{path.name}: totals.total_{outcome} is {value!r}, not a number of trajectories")
        total[outcome] = value
    unknown = sorted(set(found["labels"]) - set(names))
    if unknown:
        raise LabelError(f"{path.name}: {unknown[0]!r} is not a candidate; known are {', '.join(names)}")
    parts = [_cells(path, name, cells, total) for name, cells in found["labels"].items()]
    columns = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    return attempt, pd.DataFrame({"run": attempt, "weight": 1, **columns})


def _cells(path: Path, name: str, cells: Any, total: Mapping[str, int]) -> dict[str, list[Any]]:
    where = f"{path.name}: {name}"
    if not isinstance(cells, dict):
        raise LabelError(f"{where}: it is {type(cells).__name__}, not an object of six lists")
    strange = sorted(set(cells) - {cell for cell, _, _ in _CELLS})
    if strange:
        raise LabelError(f"{where}: unknown list {strange[0]!r}; known are {', '.join(cell for cell, _, _ in _CELLS)}")
    columns: dict[str, list[Any]] = {"trajectory_id": [], "capability": [], "label": [], "passed": []}
    seen: dict[str, str] = {}
    for outcome in ("failed", "passed"):
        count = 0
        for cell, label, of in _CELLS:
            if of != outcome:
                continue
            ids = cells.get(cell)
            if not isinstance(ids, list) or not all(isinstance(i, str | int) and not isinstance(i, bool) for i in ids):
                raise LabelError(f"{where}: {cell} must be a list of trajectory ids; it is {str(ids)[:80]!r}")
            for trajectory in map(str, ids):
                if trajectory in seen:
                    raise LabelError(f"{where}: trajectory {trajectory!r} stands in {seen[trajectory]} and in {cell}")
                seen[trajectory] = cell
                columns["trajectory_id"].append(trajectory)
            columns["label"] += [label] * len(ids)
            columns["passed"] += [outcome == "passed"] * len(ids)
            count += len(ids)
        if count != total[outcome]:
            raise LabelError(
                f"{where}: its {outcome} lists hold {count} trajectories, and total_{outcome} is {total[outcome]}"
            )
    columns["capability"] = [name] * len(columns["label"])
    return columns


def _check_same_trajectories(paths: list[Path], frames: list[pd.DataFrame]) -> None:
    """Every run speaks of the same failed and the same passed trajectories; another round's run does not."""
    sets = []
    for path, frame in zip(paths, frames, strict=True):
        of_run = None
        for name, rows in frame.groupby("capability", sort=False):
            pairs = set(zip(rows["trajectory_id"], rows["passed"], strict=True))
            if of_run is not None and pairs != of_run:
                one = sorted(pairs ^ of_run)[0][0]
                raise LabelError(f"{path.name}: {name} does not partition the same trajectories as the others: {one!r}")
            of_run = pairs
        sets.append((path, of_run or set()))
    for (first, known), (other, pairs) in pairwise(sets):
        if pairs != known:
            one, passed = sorted(pairs ^ known)[0]
            raise LabelError(
                f"{other.name} and {first.name} label different trajectories, or disagree about an outcome "
                f"(first: {one!r}, {'passed' if passed else 'failed'}); are they of one round?"
            )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise LabelError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise LabelError(f"{path.name} is not usable JSON: {error}") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found
