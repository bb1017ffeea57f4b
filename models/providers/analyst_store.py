"""The analyst's cache and spend log on the project's database."""

from __future__ import annotations

from collections.abc import Mapping

from db import ReplyRow, SpendRow, Store


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
    """`SpendLog` on the table `spend`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def total(self, round_id: str) -> Mapping[str, float]:
        """Sums over the round: calls, prompt_tokens, sampled_tokens, dollars, seconds."""
        return self._store.spent(round_id)

    def add(self, row: SpendRow) -> None:
        """Add one question's cost."""
        self._store.put([row])
