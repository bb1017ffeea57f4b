"""What became of a target, release by release: when, what changed, how well it did, what was decided, what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from db import ReleaseRow, Round, Store, VerdictRow
from tasks.releases.lookup import barred, releases_of

# Where a release's evidence has its success rate, the best evidence first.
RATED = ("test", "validation")


@dataclass(frozen=True)
class ReleaseEntry:
    """One release. `changed` says what it has that its parent has not, and what it left out; `success` is {"split",
    "success", "low", "high"} or None; `verdicts` are those of its round, by subject; `cost` is that of its round
    (seconds, calls, tokens, dollars) or None; `barred` are capabilities whose adapter may not be promoted again."""

    release: int
    id: str
    state: str
    parent: int | None
    round: int | None
    created_at: datetime
    live_at: datetime | None
    ended_at: datetime | None
    base: str
    base_revision: str
    data_hash: str
    members: Mapping[str, str]
    router: str
    changed: tuple[str, ...]
    success: Mapping[str, Any] | None
    verdicts: Mapping[str, str]
    cost: Mapping[str, float] | None
    barred: tuple[str, ...]
    reason: str


def history(store: Store, target: str) -> list[ReleaseEntry]:
    """All releases of a target, oldest first."""
    known = releases_of(store, target)
    by_id = {row.id: row for row in known}
    rounds = {row.id: row for row in store.rows(Round, target=target)}
    bars = barred(store, target)
    verdicts: dict[str, dict[str, str]] = {}
    for verdict in store.rows(VerdictRow, round_id=[row.round_id for row in known if row.round_id]):
        verdicts.setdefault(verdict.round_id, {})[verdict.subject] = verdict.verdict
    entries = []
    for row in known:
        parent = by_id.get(row.parent_id or "")
        round_ = rounds.get(row.round_id or "")
        given = verdicts.get(row.round_id or "") or dict(row.evidence.get("verdicts", {}))
        entries.append(
            ReleaseEntry(
                release=row.number,
                id=row.id,
                state=str(row.state),
                parent=None if parent is None else parent.number,
                round=None if round_ is None else round_.number,
                created_at=row.created_at,
                live_at=row.live_at,
                ended_at=row.ended_at,
                base=row.base,
                base_revision=row.base_revision,
                data_hash=row.data_hash,
                members={c: version_name(c, m) for c, m in row.members.items()},
                router=row.router,
                changed=changes(parent, row),
                success=_success(row),
                verdicts=given,
                cost=None if round_ is None else _cost(store, round_),
                barred=tuple(c for c, m in row.members.items() if m["sha256"] in bars),
                reason=row.reason,
            )
        )
    return entries


def version_name(capability: str, member: Mapping[str, str]) -> str:
    """A member as the gateway names it."""
    return f"{capability}@v{member['version']}-{member['sha256'][:8]}"


def changes(parent: ReleaseRow | None, row: ReleaseRow) -> tuple[str, ...]:
    """What tells a release from its parent (None: the bare base), one text a capability, and the router."""
    before = {} if parent is None else parent.members
    said = []
    for capability in sorted(before.keys() | row.members.keys()):
        old, new = before.get(capability), row.members.get(capability)
        if new is None:
            said.append(f"-{capability}")
        elif old is None:
            said.append(f"+{capability} v{new['version']}")
        elif old["sha256"] != new["sha256"]:
            said.append(f"{capability} v{old['version']}->v{new['version']}")
    if parent is not None and parent.router != row.router:
        said.append("router")
    return tuple(said)


def table(entries: list[ReleaseEntry]) -> list[str]:
    """The entries as lines of text, the newest first."""
    head = ("release", "state", "live since", "what changed", "success (95 %)", "verdicts", "round", "cost")
    lines = [head]
    for e in sorted(entries, key=lambda entry: -entry.release):
        verdicts = ", ".join(f"{subject} {verdict}" for subject, verdict in sorted(e.verdicts.items()))
        lines.append(
            (
                str(e.release),
                e.state,
                "-" if e.live_at is None else f"{e.live_at:%Y-%m-%d %H:%M}",
                ", ".join(e.changed) or "nothing",
                _rate(e.success),
                verdicts or "-",
                "-" if e.round is None else str(e.round),
                _spent(e.cost),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _success(row: ReleaseRow) -> dict[str, Any] | None:
    """The release's own rate in its evidence: {split: {"routed": {"success", "low", "high"}}}."""
    for split in RATED:
        rate = row.evidence.get(split, {}).get("routed")
        if rate is not None:
            return {"split": split} | {name: rate[name] for name in ("success", "low", "high")}
    return None


def _cost(store: Store, round_: Round) -> dict[str, float]:
    spent = store.spent(round_.id)
    return {
        "seconds": round_.seconds or 0.0,
        "calls": spent["calls"],
        "tokens": spent["prompt_tokens"] + spent["sampled_tokens"],
        "dollars": spent["dollars"],
    }


def _rate(success: Mapping[str, Any] | None) -> str:
    if success is None:
        return "-"
    return f"{100 * success['success']:.1f} % ({100 * success['low']:.1f} to {100 * success['high']:.1f})"


def _spent(cost: Mapping[str, float] | None) -> str:
    if cost is None:
        return "-"
    dollars = f", {cost['dollars']:.2f} $" if cost["dollars"] else ""
    return f"{cost['seconds'] / 60:.1f} min{dollars}"
