"""Of a round that stands on releases: what was live before and after it, the candidate that it made, and what became of
the capabilities that were tried."""

from __future__ import annotations

from dataclasses import dataclass

from db import ReleaseRow, VerdictRow
from tasks.releases.lookup import live_around, release_numbered, release_of_round
from tasks.reporting.figures import HistoryRow, ReleaseFigures
from tasks.reporting.history import WHOLE, changes, history_of
from tasks.round.results import TestResult
from tasks.round.stored import StoredRound

# What the gate says of an adapter that was better alone, and of a candidate that became live.
BETTER, PROMOTED = "better", "promoted"


@dataclass(frozen=True)
class BeforeAfter:
    """Numbers of the releases that were live before and after a round (0: the bare base), and the candidate's row;
    `renewed` are the capabilities of which the live release had a version."""

    before: int
    after: int
    candidate: ReleaseRow | None
    renewed: frozenset[str]


def before_after(stored: StoredRound) -> BeforeAfter | None:
    """What was live around the round; None for one from before there were releases, which tested no live one."""
    store, this = stored.store, stored.round
    test = stored.found(TestResult)
    if test is not None and test.live is None:
        return None
    before, after = live_around(store, [this])[this.id]
    live = release_numbered(store, this.target, before) if before else None
    return BeforeAfter(before, after, release_of_round(store, this.id), frozenset(live.members if live else ()))


def release_figures(stored: StoredRound) -> ReleaseFigures | None:
    """The candidate that the round made, with the gate's verdict on it as a whole; None where it made none."""
    store, this = stored.store, stored.round
    candidate = release_of_round(store, this.id)
    if candidate is None:
        return None
    parent = {r.id: r for r in store.rows(ReleaseRow, id=candidate.parent_id)} if candidate.parent_id else {}
    what = changes(candidate, parent)
    verdict = store.row(VerdictRow, round_id=this.id, subject=WHOLE)
    return ReleaseFigures(
        number=candidate.number,
        state=candidate.state,
        verdict=verdict.verdict if verdict else "",
        reasons=list(verdict.reasons) if verdict else [],
        points=verdict.points if verdict else None,
        p=verdict.p if verdict else None,
        mde=verdict.mde if verdict else None,
        new=what["new"],
        renewed=what["renewed"],
        kept=sorted(set(candidate.members) - set(what["new"]) - set(what["renewed"])),
        left=list(candidate.evidence.get("left", ())),
    )


def last_verdict(alone: VerdictRow, whole: VerdictRow | None) -> tuple[str, list[str]]:
    """What became of a capability that the gate judged: with the release that was to bring it, where its adapter was
    better alone, else by the gate's verdict on the adapter."""
    reasons = list(alone.reasons)
    if alone.verdict != BETTER or whole is None:
        return alone.verdict, reasons
    if whole.verdict == PROMOTED:
        return PROMOTED, reasons
    return "refused", [*reasons, *(f"With the release: {reason}" for reason in whole.reasons)]


def history_until(stored: StoredRound, reason: str) -> list[HistoryRow]:
    """The target's history up to and with the round, whose `reason` is not stored before it ends."""
    found: list[HistoryRow] = []
    for row in history_of(stored.store, stored.round.target):
        mine = row.round_id == stored.round.id
        found.append(row.model_copy(update={"reason": reason}) if mine and not row.reason else row)
        if mine:
            break
    return found


def data_before(history: list[HistoryRow]) -> str:
    """The hash of the target's data in the round before the last of `history`, where it was another; else ""."""
    known = [row.data_hash for row in history]
    return known[-2] if len(known) > 1 and known[-2] != known[-1] else ""
