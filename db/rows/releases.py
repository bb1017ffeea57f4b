"""Rows of releases and of what decides about them: barred adapters, looks at a split, drawn tasks, gate plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from db.values.states import ReleaseState
from db.values.types import utc_now


@dataclass(frozen=True, kw_only=True)
class ReleaseRow:
    """A row of `releases`: what answers the users of a target.

    `members` are {capability: {"adapter_id", "model", "version", "sha256"}}, model and version those of the registry;
    `adapter_id` is "" for one that no round trained (a blend). `router` is `Router.version`, `router_path` its folder
    relative to the home folder, "" without a router; a path without a version is a router whose version was not kept.
    `parent_id` is None for one made on the bare base, `round_id` for one made by hand or found in an older home.
    """

    TABLE: ClassVar[str] = "releases"

    id: str
    target: str
    number: int
    parent_id: str | None = None
    round_id: str | None = None
    base: str
    base_revision: str = ""
    data_hash: str
    members: Mapping[str, Any] = field(default_factory=dict)
    router: str = ""
    router_path: str = ""
    state: ReleaseState
    evidence: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    created_at: datetime = field(default_factory=utc_now)
    live_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class BarredRow:
    """A row of `barred`: an adapter, by its digest, that may not be promoted automatically. `release_id` is the release
    that was rolled back; `allowed_at` None: still barred."""

    TABLE: ClassVar[str] = "barred"

    target: str
    sha256: str
    release_id: str
    reason: str = ""
    since: datetime = field(default_factory=utc_now)
    allowed_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class LookRow:
    """A row of `looks`: the `number`-th look at a split, and the alpha that it may spend. `draw` is 0 for the fixed
    split, else the number of the round that drew its tasks."""

    TABLE: ClassVar[str] = "looks"

    id: str
    target: str
    data_hash: str
    split: str
    draw: int
    round_id: str
    number: int
    alpha: float
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class DrawnTaskRow:
    """A row of `drawn_tasks`: a task that a round drew; `content` is the hash of its opening and reference."""

    TABLE: ClassVar[str] = "drawn_tasks"

    round_id: str
    split: str
    task_id: str
    target: str
    data_hash: str
    family: str
    content: str


@dataclass(frozen=True, kw_only=True)
class GatePlanRow:
    """A row of `gate_plans`: the rules of a round's gate as they stood before its first evaluation episode. `sha256` is
    that of `rules` as canonical JSON."""

    TABLE: ClassVar[str] = "gate_plans"

    round_id: str
    sha256: str
    rules: Mapping[str, Any] = field(default_factory=dict)
    created_at: datetime = field(default_factory=utc_now)
