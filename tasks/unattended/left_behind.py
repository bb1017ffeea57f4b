"""Rounds that were stopped and that nobody goes on with, because the settings are others now: a round is gone on with
by the same settings alone. The first round that is begun in its place says so; one that later rounds of its target have
left behind is told by the doctor, and given up by `trace-agent clean` in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from db import Round, RoundState, StageRow, Store
from db.values.states import is_final
from tasks.unattended.alive import has_ended

# The profile of a round that plays nothing, and says nothing of what is wanted now.
DRY = "dry"
# So many settings are named, of those that became others.
MOST_NAMED = 4


@dataclass(frozen=True)
class LeftBehind:
    """A round that was stopped, when somebody was last at work on it, and the number of the last round of its target
    that came to its end since."""

    round: Round
    since: datetime
    followed_by: int

    def text(self) -> str:
        """As people read it."""
        this = self.round
        return (
            f"round {this.number} of {this.target} was stopped at {self.since:%Y-%m-%d %H:%M} UTC, and round "
            f"{self.followed_by} has ended since"
        )


def left_behind(store: Store) -> list[LeftBehind]:
    """The rounds that are not over, that no living process has open, and after which another one of their target came
    to its end. Oldest first."""
    rounds, held = sorted(store.rows(Round), key=lambda row: row.number), _held(store)
    last = {row.target: row.number for row in rounds if row.state == RoundState.DONE and row.profile != DRY}
    return [
        LeftBehind(row, _last_seen(store, row), last[row.target])
        for row in rounds
        if not is_final(row.state) and row.id not in held and last.get(row.target, 0) > row.number
    ]


def other_settings(store: Store, begun: Round) -> str:
    """What is said of the round before `begun`, where that was stopped and `begun` has other settings; "" where it was
    not, or somebody is at work on it."""
    earlier = [r for r in store.rows(Round, target=begun.target) if r.number < begun.number and r.profile != DRY]
    before = max(earlier, key=lambda row: row.number, default=None)
    if before is None or is_final(before.state) or before.id in _held(store):
        return ""
    names = list(_differing(_settings(before), _settings(begun)))
    if not names:  # a fresh round was asked for
        return ""
    named = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    return f"round {before.number} was stopped and is not gone on with: it was begun with other settings ({named})"


def _held(store: Store) -> set[str]:
    return {row.round_id for row in store.held() if not has_ended(row.owner or "")}


def _last_seen(store: Store, row: Round) -> datetime:
    """When a process was last at work on a round: by its own word, or by the last heartbeat of one that was killed."""
    signs = store.rows(StageRow, round_id=row.id) + store.presences(round_id=row.id)
    stopped = row.started_at + timedelta(seconds=row.seconds or 0.0)
    return max([stopped, *(sign.heartbeat_at for sign in signs if sign.heartbeat_at is not None)])


def _settings(row: Round) -> dict[str, Any]:
    return {"profile": row.profile, "seed": row.seed, **row.config}


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """The names of settings that are not the same in both."""
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differing(old, new, f"{within}{name}.")
        elif old != new:
            yield f"{within}{name}"
