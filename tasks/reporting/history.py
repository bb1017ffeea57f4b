"""The rounds and releases of a target so far: what each changed, success on the test split after it, verdict and cost.

Read from rows alone, without the libraries that made them: `trace-agent history` has to answer at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from db import EvaluationRow, ReleaseRow, Round, SpendRow, StageRow, StageState, Store, VerdictRow
from db.values.states import is_final
from errors import StoreError
from tasks.releases.lookup import barred, live_around, made_by_round, releases_of, version_name
from tasks.reporting.figures import HistoryRow, Rate
from tasks.reporting.nothing_trained import ending_of
from tasks.round.results import GateResult, ReportResult, TestResult
from tasks.round.stored import StoredRound
from tasks.unattended.alive import as_told

# The subject of the gate's verdict on a release as a whole.
WHOLE = "release"
RHO = 0.10
FIRST_WORDS = 300


def history_of(store: Store, target: str) -> list[HistoryRow]:
    """One row a round, and one for each release that no round made, oldest first. Dry rounds play nothing and are left
    out."""
    releases = releases_of(store, target)
    rounds = as_told(store, [r for r in store.rows(Round, target=target) if r.profile != "dry"])
    parts = _Parts(store, rounds, releases)
    rows = [(r.started_at, r.number, _of_round(r, parts)) for r in rounds]
    rows += [(r.created_at, 0, _of_release(r, parts)) for r in releases if r.round_id is None]
    return [row for *_, row in sorted(rows, key=lambda found: found[:2])]


def lineages(rows: Sequence[HistoryRow]) -> list[int]:
    """Number of each row's lineage, from 1: it grows where the target's data became other data, or the base another
    model, across which figures are not compared. What a row does not say is as before it."""
    found: list[int] = []
    data = base = ""
    for row in rows:
        other = bool((data and row.data_hash and row.data_hash != data) or (base and row.base_model not in ("", base)))
        found.append((found[-1] + other) if found else 1)
        data, base = row.data_hash or data, row.base_model or base
    return found


class _Parts:
    """What the store holds of a target's rounds, each table read once."""

    def __init__(self, store: Store, rounds: Sequence[Round], releases: Sequence[ReleaseRow]) -> None:
        ids = [r.id for r in rounds]
        self.store = store
        self.barred = barred(store, releases[0].target) if releases else {}
        self.by_id = {r.id: r for r in releases}
        self.made = made_by_round(releases)
        self.verdicts: dict[str, dict[str, str]] = defaultdict(dict)
        for verdict in store.rows(VerdictRow, round_id=ids):
            self.verdicts[verdict.round_id][verdict.subject] = verdict.verdict
        tested = {row.round_id: row.result or {} for row in store.rows(StageRow, round_id=ids, name=TestResult.stage)}
        self.test: dict[tuple[str, str], Rate] = {
            (row.round_id, row.subject): _rate(row, tested.get(row.round_id, {}).get(row.subject) or {})
            for row in store.rows(EvaluationRow, round_id=ids, split="test")
            if row.success is not None
        }
        self.around = live_around(store, rounds)
        # As a round's own figures have it, which are made before the stage that makes them is done.
        self.seconds = store.worked(without=ReportResult.stage)
        self.gates = {
            stage.round_id: GateResult.model_validate(stage.result) if stage.state == StageState.DONE else None
            for stage in store.rows(StageRow, round_id=ids, name=GateResult.stage)
            if is_final(StageState(stage.state))
        }
        self.dollars: dict[str | None, float] = defaultdict(float)
        for spent in store.rows(SpendRow, round_id=ids):
            self.dollars[spent.round_id] += spent.dollars


def _rate(row: EvaluationRow, told: Mapping[str, Any]) -> Rate:
    """A side's rate with what it was taken of, as the stage's result has it; of an earlier version's, which counted no
    finished episodes, all that were to be played."""
    success = row.success or 0.0
    low, high = (success if end is None else end for end in (row.low, row.high))
    planned = (row.n_tasks * row.trials, row.n_tasks)
    n, tasks = (told["n"], told["tasks"]) if told.get("n") else planned
    return Rate(success=success, low=low, high=high, n=n, tasks=tasks)


def _of_round(row: Round, parts: _Parts) -> HistoryRow:
    made, verdicts = parts.made.get(row.id), dict(parts.verdicts.get(row.id, {}))
    whole = verdicts.pop(WHOLE, "")
    verdict, reason = _verdict(row, parts, whole, verdicts)
    return HistoryRow(
        round=row.number,
        round_id=row.id,
        candidate=made.number if made else None,
        after=_after(row, parts),
        when=(row.finished_at or row.started_at).isoformat(timespec="seconds"),
        data_hash=row.data_hash,
        base_model=str(row.config.get("base_model", "")),
        state=made.state if made else "",
        **(_brought(made, parts) if made else {}),
        test=parts.test.get((row.id, "routed")),
        base=parts.test.get((row.id, "base")),
        verdict=verdict,
        verdicts=verdicts,
        reason=reason[:FIRST_WORDS],
        seconds=round(parts.seconds.get(row.id, 0.0), 2),
        dollars=round(parts.dollars[row.id], 6),
    )


def _of_release(row: ReleaseRow, parts: _Parts) -> HistoryRow:
    """A release that no round made: by hand, or found in an older home."""
    evidence = row.evidence.get("test", {})
    evidence = evidence.get("routed", evidence)
    return HistoryRow(
        candidate=row.number,
        after=row.number if row.live_at is not None else None,
        when=row.created_at.isoformat(timespec="seconds"),
        data_hash=row.data_hash,
        base_model=row.base,
        state=row.state,
        **_brought(row, parts),
        test=Rate.model_validate(evidence) if evidence else None,
        verdict="no round",
        reason=row.reason[:FIRST_WORDS],
    )


def _brought(release: ReleaseRow, parts: _Parts) -> dict[str, Any]:
    """What a release changed, what it is made of, and what of it is barred."""
    return {
        **changes(release, parts.by_id),
        "left": list(release.evidence.get("left", ())),
        "members": {c: version_name(c, m) for c, m in release.members.items()},
        "barred": [c for c, m in release.members.items() if m["sha256"] in parts.barred],
    }


def changes(release: ReleaseRow, by_id: Mapping[str, ReleaseRow]) -> dict[str, list[str]]:
    """Capabilities that a release has newly, in another version, or no more, against its parent."""
    parent = by_id.get(release.parent_id or "")
    before: Mapping[str, Any] = parent.members if parent else {}
    after = release.members
    return {
        "new": sorted(set(after) - set(before)),
        "renewed": sorted(c for c in set(after) & set(before) if after[c]["sha256"] != before[c]["sha256"]),
        "gone": sorted(set(before) - set(after)),
    }


def _after(row: Round, parts: _Parts) -> int | None:
    """Number of the release that was live when the round ended; None while the round has not tested it, and for a round
    from before there were releases, which tested no live one."""
    return parts.around[row.id][1] if (row.id, "live") in parts.test else None


def _verdict(row: Round, parts: _Parts, whole: str, verdicts: Mapping[str, str]) -> tuple[str, str]:
    """How the round ended, in a word or two, and why."""
    if row.id not in parts.gates:
        return str(row.state), row.reason
    made = parts.made.get(row.id)
    if whole:
        return whole, made.reason if made else ""
    if "promoted" in verdicts.values():  # before there were releases
        return "promoted", ""
    if verdicts:
        return "no adapter better", ", ".join(f"{c} ({v})" for c, v in verdicts.items())
    try:
        rho = row.config.get("selection", {}).get("rho", RHO)
        return str(ending_of(StoredRound(parts.store, row), rho)), row.reason
    except StoreError as problem:  # stored by another version, whose results cannot be read
        return str(row.state), row.reason or str(problem)
