"""Rows of `shards`: parts of the episodes that a stage owes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from db.values.states import ShardState
from db.values.types import utc_now


@dataclass(frozen=True, kw_only=True)
class ShardRow:
    """A row of `shards`: `episodes` of them, which one worker plays under a lease."""

    TABLE: ClassVar[str] = "shards"

    id: str
    round_id: str
    part: str
    number: int
    episodes: int = 0
    state: ShardState = ShardState.PENDING
    owner: str | None = None
    lease_until: datetime | None = None
    heartbeat_at: datetime | None = None
    attempt: int = 0
    work: Mapping[str, Any] = field(default_factory=dict)
    created_at: datetime = field(default_factory=utc_now)
    finished_at: datetime | None = None
