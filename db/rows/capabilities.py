"""Rows from mining to calibration: capabilities, labels, selections, synthesized environments, calibrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from db.values.states import EnvironmentState
from db.values.types import utc_now

# The name of the row that is no candidate: what a round trains last, on all that it has trained for
# (`tasks/synthesis/learning/generalist.py`). Names of candidates have two words or more.
GENERALIST = "generalist"


@dataclass(frozen=True, kw_only=True)
class CapabilityRow:
    """A row of `capabilities`: a candidate of a round, or the generalist. `examples` are evidence in the analyst's own
    form."""

    TABLE: ClassVar[str] = "capabilities"

    id: str
    round_id: str
    name: str
    definition: str = ""
    analyst: str
    examples: Sequence[Any] | Mapping[str, Any] = field(default_factory=list)
    trainable: bool = True
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LabelRow:
    """A row of `labels`: what the labelling run number `run` says about one trajectory and one capability ("NA",
    "PRESENT" or "LACKING"). `weight` is how often the bootstrap resample of the run drew the trajectory."""

    TABLE: ClassVar[str] = "labels"

    round_id: str
    run: int
    trajectory_id: str
    capability_id: str
    label: str
    weight: int = 1
    request_hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class SelectionRow:
    """A row of `selections`: whether a capability was selected, with the figures of the rule. `evidence` holds
    {"id", "votes"} by trajectory."""

    TABLE: ClassVar[str] = "selections"

    round_id: str
    capability_id: str
    selected: bool
    rank: int | None = None
    mean_cov: float | None = None
    std_cov: float | None = None
    mean_delta: float | None = None
    std_delta: float | None = None
    runs_passed: int = 0
    runs: int = 0
    kappa: float | None = None
    evidence: Sequence[Mapping[str, Any]] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class EnvironmentRow:
    """A row of `synthesized_environments`: one version of the training environment of a capability, with every figure
    of its checks in `verdicts`."""

    TABLE: ClassVar[str] = "synthesized_environments"

    id: str
    round_id: str
    capability_id: str
    version: int
    kind: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    code_hash: str = ""
    state: EnvironmentState
    sandbox_level: str = ""
    verdicts: Mapping[str, Any] = field(default_factory=dict)
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, kw_only=True)
class CalibrationRow:
    """A row of `calibrations`: how a policy fares in a synthesized environment before it may train anything."""

    TABLE: ClassVar[str] = "calibrations"

    id: str
    environment_id: str
    policy_id: str
    seeds: int
    samples: int
    mean_reward: float | None = None
    success_rate: float | None = None
    std_reward: float | None = None
    all_success: float | None = None
    all_zero: float | None = None
    informative: float | None = None
    low: float | None = None
    high: float | None = None
    accepted: bool
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
