"""Rows of `rounds`, `stages` and `spend`: one run of the loop, and what its stages did and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from db.values.states import RoundState, StageState
from db.values.types import utc_now


@dataclass(frozen=True, kw_only=True)
class Round:
    """A row of `rounds`. `number` counts 1, 2, 3 over all targets; `peak_gib` is memory, `seconds` count from start.
    `parent_id` is the release that was live when it began; None: the bare base."""

    TABLE: ClassVar[str] = "rounds"

    id: str
    number: int
    parent_id: str | None = None
    target: str
    data_hash: str
    seed: int
    profile: str
    config: Mapping[str, Any] = field(default_factory=dict)
    state: RoundState
    reason: str = ""
    code_version: str = ""
    started_at: datetime = field(default_factory=utc_now)
    finished_at: datetime | None = None
    peak_gib: float | None = None
    seconds: float | None = None


# How rows of `stages` are called that are no stage's: a process that has the round open (`db.ledger.Presence`).
PROCESS = "process:"


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """A row of `stages`. `seconds` are those of all attempts; while one runs, of those before it."""

    TABLE: ClassVar[str] = "stages"

    id: str
    round_id: str
    name: str
    state: StageState = StageState.PENDING
    owner: str | None = None
    lease_until: datetime | None = None
    heartbeat_at: datetime | None = None
    attempt: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    seconds: float | None = None
    error: str | None = None
    result: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class SpendRow:
    """A row of `spend`: what a stage spent on a model. `round_id` is None for what was spent outside a round."""

    TABLE: ClassVar[str] = "spend"

    id: str
    round_id: str | None = None
    stage: str
    model: str
    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    dollars: float = 0.0
    seconds: float = 0.0
