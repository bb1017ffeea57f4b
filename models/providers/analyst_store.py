"""The analyst's cache of replies and the client's log of spending on the project's database."""

from __future__ import annotations

import threading
import uuid
from dataclasses import asdict

from db import ReplyRow, SpendRow, Store
from models.providers.spending import Spent


class StoredReplies:
    """`ReplyCache` on the table `replies`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, request_hash: str) -> ReplyRow | None:
        """The row of a request, or None."""
        return self._store.row(ReplyRow, request_hash=request_hash)

    def put(self, row: ReplyRow) -> None:
        """Keep a reply, in place of one that did not pass its check any more."""
        self._store.put([row], replace=True)


class StoredSpend:
    """`SpendLog` on the table `spend`: a row per call. Without a round it holds what was spent outside of one."""

    def __init__(self, store: Store, round_id: str | None = None) -> None:
        self._store, self.round_id = store, round_id
        self._added = Spent()
        # A row and its sum go together, or a call would be counted twice or not at all.
        self._adding = threading.Lock()

    def elsewhere(self) -> Spent:
        """What the round has spent before this log was opened, and since then in other processes; nothing outside of a
        round."""
        if self.round_id is None:
            return Spent()
        with self._adding:
            sums, mine = self._store.spent(self.round_id), self._added
            return Spent(
                int(sums["calls"]) - mine.calls,
                int(sums["prompt_tokens"]) - mine.prompt_tokens,
                int(sums["sampled_tokens"]) - mine.sampled_tokens,
                max(0.0, float(sums["dollars"]) - mine.dollars),  # sums of fractions leave a remainder
            )

    def add(self, purpose: str, model: str, cost: Spent, seconds: float) -> None:
        """Add one call's cost; `purpose` is kept as the stage."""
        # A payment is unique by having been made: a hash of its content would merge two of them.
        identity = uuid.uuid4().hex[:16]
        row = SpendRow(id=identity, round_id=self.round_id, stage=purpose, model=model, seconds=seconds, **asdict(cost))
        with self._adding:
            self._store.put([row])
            self._added.add(cost)
