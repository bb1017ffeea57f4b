"""Rows from training to the gate: adapters, their training steps, evaluations, verdicts, routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from db.values.states import AdapterState
from db.values.types import utc_now


@dataclass(frozen=True, kw_only=True)
class AdapterRow:
    """A row of `adapters`: one LoRA adapter. `path` is relative to the home folder. Capability and environment are None
    for one trained on the target itself or on a mixture."""

    TABLE: ClassVar[str] = "adapters"

    id: str
    round_id: str
    capability_id: str | None = None
    environment_id: str | None = None
    base: str
    base_revision: str = ""
    sha256: str = ""
    path: str = ""
    state: AdapterState
    registered_model: str | None = None
    registered_version: str | None = None
    base_success: float | None = None
    adapter_success: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class TrainingStepRow:
    """A row of `training_steps`: one optimizer step of an adapter's training. Reward and success are those of all
    episodes on the capability's own scenarios; `metrics` has those of its retention scenarios."""

    TABLE: ClassVar[str] = "training_steps"

    adapter_id: str
    step: int
    reward: float | None = None
    success: float | None = None
    loss: float | None = None
    clip_fraction: float | None = None
    kl: float | None = None
    logprob_gap: float | None = None
    seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """A row of `evaluations`: the success rate of a subject ("base", "routed", "noop" or an adapter id) on a split,
    with its interval."""

    TABLE: ClassVar[str] = "evaluations"

    id: str
    round_id: str
    split: str
    subject: str
    n_tasks: int
    trials: int
    success: float | None = None
    low: float | None = None
    high: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """A row of `verdicts`: what the gate decided on a subject, and the figures behind it. `points` and `mde` are
    percentage points."""

    TABLE: ClassVar[str] = "verdicts"

    round_id: str
    subject: str
    capability_id: str | None = None
    verdict: str
    points: float | None = None
    p: float | None = None
    p_holm: float | None = None
    mde: float | None = None
    reasons: Sequence[str] = field(default_factory=list)
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class RouteRow:
    """A row of `routes`: the router's decision for a trajectory, which may not be stored yet. `capability` is "" for no
    adapter."""

    TABLE: ClassVar[str] = "routes"

    trajectory_id: str
    round_id: str | None = None
    router_version: str
    capability: str
    adapter_id: str | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    neighbours: Sequence[Any] = field(default_factory=list)
    milliseconds: float = 0.0
