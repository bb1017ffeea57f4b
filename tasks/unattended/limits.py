"""The most that a round may take: episodes, tokens, hours at work, GiB of its own files (`limits` in the settings).

A limit is held before episodes are played, after each batch of them that was stored, between training steps, and before
a language model is asked: what is stopped was stored, and the same command with a larger limit goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from db import Round, StageRow, Store
from db.ledger import seconds_spent
from db.rows.conversations import TRAFFIC
from errors import LimitReached
from settings_parts import LimitSettings
from tasks.unattended.sizes import size_of

# Between two looks during play, and while a language model is asked: a count of a hundred thousand rows takes a tenth
# of a second.
EVERY_SECONDS = 10.0


class RoundLimits:
    """Holds one open round to its limits. Hours are those of this run and, by the ledger, of the runs before it."""

    def __init__(self, limits: LimitSettings, store: Store, opened: Round, folder: Path) -> None:
        self.limits, self.store, self.round, self.folder = limits, store, opened, folder
        self._began = time.monotonic()
        self._earlier = at_work(store.rows(StageRow, round_id=opened.id))
        self._looked = float("-inf")

    @property
    def any(self) -> bool:
        """Whether the round has a limit at all."""
        limits = self.limits
        return bool(limits.rollouts or limits.tokens or limits.hours or limits.disk_gib)

    def look(self) -> None:
        """`check`, at most once in `EVERY_SECONDS`: for loops."""
        if self.any and time.monotonic() - self._looked >= EVERY_SECONDS:
            self.check()

    def waited(self, seconds: float) -> None:
        """So long nothing was done: it counts to no hours."""
        self._earlier -= seconds

    def check(self, more: int = 0) -> None:
        """Raise `LimitReached` when a limit is reached; that of episodes when `more` of them would pass it."""
        if not self.any:
            return
        self._looked = time.monotonic()
        limits = self.limits
        if limits.rollouts and more and (played := self.episodes()) + more > limits.rollouts:
            self._reached("rollouts", limits.rollouts, f"{played} episodes are played and {more} are next")
        if limits.tokens and (tokens := self.tokens()) >= limits.tokens:
            self._reached("tokens", limits.tokens, f"{tokens} tokens are used")
        if limits.hours and (hours := self.hours()) >= limits.hours:
            self._reached("hours", limits.hours, f"it was at work for {hours:.2f} hours")
        if limits.disk_gib and (size := self.disk_gib()) >= limits.disk_gib:
            self._reached("disk_gib", limits.disk_gib, f"its files take {size:.2f} GiB")

    def episodes(self) -> int:
        """Stored episodes of the round, lost ones included: they took their time, too. Users' conversations, which it
        only imports, are none."""
        return self._sum("count(*)")

    def trained(self, adapter: str, seed: int) -> int:
        """Stored episodes of one step in an adapter's training: those with its seed."""
        mine = "purpose = 'training' AND adapter_id = :adapter AND seed = :seed"
        return self._sum("count(*)", mine, adapter=adapter, seed=seed) if self.limits.rollouts else 0

    def tokens(self) -> int:
        """Tokens of prompts and answers, of the model that is trained and of language models that were asked."""
        spent = self.store.spent(self.round.id)
        asked = int(spent["prompt_tokens"] + spent["sampled_tokens"])
        return asked + self._sum("coalesce(sum(prompt_tokens + sampled_tokens), 0)")

    def hours(self) -> float:
        """Hours at work in all runs of the round."""
        return (self._earlier + time.monotonic() - self._began) / 3600

    def disk_gib(self) -> float:
        """GiB of the round's folder."""
        return size_of(self.folder) / 2**30

    def _sum(self, what: str, where: str = "TRUE", **given: str | int) -> int:
        text = f"SELECT {what} AS n FROM trajectories WHERE round_id = :round AND target <> :traffic AND {where}"
        frame = self.store.query(text, round=self.round.id, traffic=TRAFFIC, **given)
        return int(frame["n"].iloc[0])

    def _reached(self, name: str, limit: float, what: str) -> None:
        raise LimitReached(
            f"round {self.round.number} has reached limits.{name} = {limit:g}: {what}; nothing is lost: raise it "
            f"(TRACE_LIMITS__{name.upper()}) and the same command goes on from here"
        )


def at_work(stages: Iterable[StageRow]) -> float:
    """Seconds in which one of these stages was at work. An attempt whose process died counts up to its last heartbeat;
    last attempts that ran side by side count once."""
    total, until = 0.0, None
    for row in sorted(stages, key=lambda row: (row.started_at is not None, row.started_at)):
        began, ended = row.started_at, row.finished_at or row.heartbeat_at
        spent = seconds_spent(row) or 0.0
        if began is None or ended is None:
            total += spent
            continue
        last = max(0.0, (ended - began).total_seconds())  # the clock may have been set back
        alone = (ended - max(began, until or began)).total_seconds()
        total += max(0.0, spent - last) + max(0.0, alone)
        until = max(ended, until or ended)
    return total
