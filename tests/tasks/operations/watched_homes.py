"""A target and releases of it for tests of the watch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from db import ConversationRow, ReleaseRow, ReleaseState
from environments.contract import TargetTask
from tests.tasks.counting_target import Counting

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
LIVE_SINCE = NOW - timedelta(hours=30)


class Target:
    name, licence, data_hash, environment = "shop", "none", "data-1", Counting

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return [TargetTask(f"v{n}", "validation", "even" if n % 2 else "odd", n, {"n": n}) for n in range(60)]


def release(number: int, state: ReleaseState, parent: str | None = None, **changes: Any) -> ReleaseRow:
    given: dict[str, Any] = {
        "id": f"r{number}", "target": "shop", "number": number, "parent_id": parent, "base": "b",
        "base_revision": "1", "data_hash": "data-1", "members": {}, "state": state,
        "live_at": LIVE_SINCE - timedelta(days=10 * (2 - number)),
    }  # fmt: skip
    return ReleaseRow(**given | changes)


def both(world: Any, **changes: Any) -> None:
    """Release 2 in place of release 1."""
    replaced = release(1, ReleaseState.RETIRED, ended_at=LIVE_SINCE)
    world.store.put([replaced, release(2, ReleaseState.LIVE, "r1", **changes)])


def conversation(number: int, success: bool | None, when: datetime, release: int | None = None) -> ConversationRow:
    """One that the router decided, with what its user said of it."""
    return ConversationRow(
        id=f"c{number}", conversation=str(number), target="shop", base="b", policy_id="p", capability="", adapter="",
        mode="route", router_version="", success=success, created_at=when, release=release,
    )  # fmt: skip
