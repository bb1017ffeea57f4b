"""Rows of a comparison of methods: accounts of episodes, and what was charged to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from db.values.types import utc_now


@dataclass(frozen=True, kw_only=True)
class MethodAccountRow:
    """A row of `method_accounts`: at most `episodes` may be charged to the method. `inherits` names accounts whose
    episodes, seconds and dollars count as its own, too."""

    TABLE: ClassVar[str] = "method_accounts"

    method: str
    episodes: int
    inherits: Sequence[Any] = field(default_factory=list)
    seconds: float = 0.0
    dollars: float = 0.0
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class EpisodeChargeRow:
    """A row of `episode_charges`: an episode that a method asked for. The purpose "test" is paid by no budget."""

    TABLE: ClassVar[str] = "episode_charges"

    method: str
    trajectory_id: str
    purpose: str
    created_at: datetime = field(default_factory=utc_now)
