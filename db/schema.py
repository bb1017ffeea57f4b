"""The tables. What is filtered or joined is a column; JSON holds open payloads only; token arrays are blobs.

Change a table here (or in `db/*_tables.py`) and its dataclass in `db/rows`, move `HEAD`, and let `python -m
db.new_migration` write the migration; the tests compare the three, and `docs/2-database.md` lists the column.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

import db.method_tables
import db.release_tables
import db.shard_tables  # noqa: F401  (adds its table)
from db.values.types import Array, Base, Big, Blob, Count, Created, Id, Json, LongText, Moment, Object, OfRound, Seconds

HEAD = "0006"
VERSION_TABLE = "trace_alembic_version"


class Round(Base):
    """One run of the loop. `number` counts 1, 2, 3 over all targets and is given by the store. `parent_id` is the
    release that was live when it began, null for the bare base (no foreign key: releases refer to rounds)."""

    __tablename__ = "rounds"
    __table_args__ = (UniqueConstraint("number"), Index(None, "target", "state"))

    id: Mapped[Id]
    number: Mapped[int]
    parent_id: Mapped[str | None]
    target: Mapped[str]
    data_hash: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    profile: Mapped[str]
    config: Mapped[Object]
    state: Mapped[str]
    reason: Mapped[LongText]
    code_version: Mapped[str] = mapped_column(default="")
    started_at: Mapped[Created]
    finished_at: Mapped[Moment]
    peak_gib: Mapped[float | None]
    seconds: Mapped[float | None]


class Stage(Base):
    """One stage of a round: who works on it, until when the lease holds, and its result. A row called `process:OWNER`
    is no stage's: it is a process that has the round open, and goes with it."""

    __tablename__ = "stages"
    __table_args__ = (UniqueConstraint("round_id", "name"),)

    id: Mapped[Id]
    round_id: Mapped[OfRound]
    name: Mapped[str]
    state: Mapped[str] = mapped_column(default="pending")
    owner: Mapped[str | None]
    lease_until: Mapped[Moment]
    heartbeat_at: Mapped[Moment]
    attempt: Mapped[Count]
    started_at: Mapped[Moment]
    finished_at: Mapped[Moment]
    seconds: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(Text)
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)


class Trajectory(Base):
    """One stored episode. With `error_boundary` it is an infrastructure failure: no reward, in no denominator,
    owed again. `round_id` is null for live traffic outside a round."""

    __tablename__ = "trajectories"
    __table_args__ = (
        CheckConstraint("error_boundary IS NULL OR (reward IS NULL AND success IS NULL)", name="error_has_no_reward"),
        Index(None, "round_id", "purpose"),
        Index(None, "target", "task_id"),
        Index(None, "policy_id"),
        Index(None, "adapter_id"),
        Index(None, "environment"),
    )

    id: Mapped[Id]
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.id"))
    purpose: Mapped[str]
    target: Mapped[str]
    data_hash: Mapped[str]
    environment: Mapped[str]
    task_id: Mapped[str]
    family: Mapped[str]
    split: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    trial: Mapped[int]
    policy_id: Mapped[str]
    base: Mapped[str]
    adapter_id: Mapped[str | None]
    group_id: Mapped[str | None]
    reward: Mapped[float | None]
    success: Mapped[bool | None]
    termination: Mapped[str]
    error_boundary: Mapped[str | None]
    error: Mapped[str | None] = mapped_column(Text)
    n_steps: Mapped[Count]
    prompt_tokens: Mapped[Big]
    sampled_tokens: Mapped[Big]
    seconds: Mapped[Seconds]
    metrics: Mapped[Object]
    messages: Mapped[Array]
    token_ids: Mapped[Blob]
    sampled_mask: Mapped[Blob]
    logprobs: Mapped[Blob]
    created_at: Mapped[Created]


class Step(Base):
    """One action of a trajectory and what the environment answered."""

    __tablename__ = "steps"

    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.id"), primary_key=True)
    idx: Mapped[int] = mapped_column(primary_key=True)
    action: Mapped[Object]
    observation: Mapped[Array]
    sampled_tokens: Mapped[Count]
    milliseconds: Mapped[Seconds]


class Check(Base):
    """One verdict of the verifier on a trajectory."""

    __tablename__ = "checks"
    __table_args__ = (Index(None, "kind"),)

    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.id"), primary_key=True)
    idx: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    kind: Mapped[str]
    required: Mapped[bool]
    passed: Mapped[bool]
    detail: Mapped[LongText]


class Capability(Base):
    """A candidate capability of a round, as the analyst named and defined it."""

    __tablename__ = "capabilities"
    __table_args__ = (UniqueConstraint("round_id", "name"),)

    id: Mapped[Id]
    round_id: Mapped[OfRound]
    name: Mapped[str]
    definition: Mapped[LongText]
    analyst: Mapped[str]
    examples: Mapped[Array]
    trainable: Mapped[bool] = mapped_column(default=True)
    note: Mapped[LongText]


class Label(Base):
    """What one labelling run says about one trajectory and one capability. `weight` is the number of times that the
    bootstrap resample of the run drew the trajectory."""

    __tablename__ = "labels"
    __table_args__ = (
        CheckConstraint("label IN ('NA', 'PRESENT', 'LACKING')", name="label_known"),
        Index(None, "capability_id", "label"),
        Index(None, "trajectory_id"),
    )

    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    run: Mapped[int] = mapped_column(primary_key=True)
    trajectory_id: Mapped[str] = mapped_column(ForeignKey("trajectories.id"), primary_key=True)
    capability_id: Mapped[str] = mapped_column(ForeignKey("capabilities.id"), primary_key=True)
    label: Mapped[str]
    weight: Mapped[int] = mapped_column(default=1)
    request_hash: Mapped[str | None]


class Selection(Base):
    """Whether a capability was selected, with the figures of the rule and the evidence ([{"id", "votes"}])."""

    __tablename__ = "selections"

    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    capability_id: Mapped[str] = mapped_column(ForeignKey("capabilities.id"), primary_key=True)
    selected: Mapped[bool]
    rank: Mapped[int | None]
    mean_cov: Mapped[float | None]
    std_cov: Mapped[float | None]
    mean_delta: Mapped[float | None]
    std_delta: Mapped[float | None]
    runs_passed: Mapped[Count]
    runs: Mapped[Count]
    kappa: Mapped[float | None]
    evidence: Mapped[Array]
    reason: Mapped[LongText]


class SynthesizedEnvironment(Base):
    """One version of the training environment of a capability, with every figure of its checks in `verdicts`."""

    __tablename__ = "synthesized_environments"
    __table_args__ = (Index(None, "round_id"), Index(None, "capability_id", "version"))

    id: Mapped[Id]
    round_id: Mapped[OfRound]
    capability_id: Mapped[str] = mapped_column(ForeignKey("capabilities.id"))
    version: Mapped[int]
    kind: Mapped[str]
    spec: Mapped[Object]
    code: Mapped[str | None] = mapped_column(Text)
    code_hash: Mapped[str] = mapped_column(default="")
    state: Mapped[str]
    sandbox_level: Mapped[str] = mapped_column(default="")
    verdicts: Mapped[Object]
    created_at: Mapped[Created]


class Calibration(Base):
    """How a policy fares in a synthesized environment before it may train anything."""

    __tablename__ = "calibrations"
    __table_args__ = (Index(None, "environment_id"),)

    id: Mapped[Id]
    environment_id: Mapped[str] = mapped_column(ForeignKey("synthesized_environments.id"))
    policy_id: Mapped[str]
    seeds: Mapped[int]
    samples: Mapped[int]
    mean_reward: Mapped[float | None]
    success_rate: Mapped[float | None]
    std_reward: Mapped[float | None]
    all_success: Mapped[float | None]
    all_zero: Mapped[float | None]
    informative: Mapped[float | None]
    low: Mapped[float | None]
    high: Mapped[float | None]
    accepted: Mapped[bool]
    reason: Mapped[LongText]
    detail: Mapped[Object]


class Adapter(Base):
    """One LoRA adapter. Capability and environment are null for one trained on the target itself or on a mixture."""

    __tablename__ = "adapters"
    __table_args__ = (Index(None, "round_id"), Index(None, "capability_id"), Index(None, "state"))

    id: Mapped[Id]
    round_id: Mapped[OfRound]
    capability_id: Mapped[str | None] = mapped_column(ForeignKey("capabilities.id"))
    environment_id: Mapped[str | None] = mapped_column(ForeignKey("synthesized_environments.id"))
    base: Mapped[str]
    base_revision: Mapped[str] = mapped_column(default="")
    sha256: Mapped[str] = mapped_column(default="")
    path: Mapped[str] = mapped_column(default="")
    state: Mapped[str]
    registered_model: Mapped[str | None]
    registered_version: Mapped[str | None]
    base_success: Mapped[float | None]
    adapter_success: Mapped[float | None]
    config: Mapped[Object]
    metrics: Mapped[Object]
    created_at: Mapped[Created]


class TrainingStep(Base):
    """One optimizer step of an adapter's training."""

    __tablename__ = "training_steps"

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    reward: Mapped[float | None]
    success: Mapped[float | None]
    loss: Mapped[float | None]
    clip_fraction: Mapped[float | None]
    kl: Mapped[float | None]
    logprob_gap: Mapped[float | None]
    seconds: Mapped[Seconds]
    metrics: Mapped[Object]


class Evaluation(Base):
    """The success rate on a split, with its interval: "base", "live", "routed" (candidate; on test the new), "noop"."""

    __tablename__ = "evaluations"
    __table_args__ = (Index(None, "round_id", "split"),)

    id: Mapped[Id]
    round_id: Mapped[OfRound]
    split: Mapped[str]
    subject: Mapped[str]
    n_tasks: Mapped[int]
    trials: Mapped[int]
    success: Mapped[float | None]
    low: Mapped[float | None]
    high: Mapped[float | None]
    detail: Mapped[Object]


class Verdict(Base):
    """What the gate decided on a subject, and the figures behind it. `points` and `mde` are percentage points."""

    __tablename__ = "verdicts"

    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    capability_id: Mapped[str | None] = mapped_column(ForeignKey("capabilities.id"))
    verdict: Mapped[str]
    points: Mapped[float | None]
    p: Mapped[float | None]
    p_holm: Mapped[float | None]
    mde: Mapped[float | None]
    reasons: Mapped[Array]
    created_at: Mapped[Created]


class Route(Base):
    """The router's decision for a trajectory; `capability` is "" for no adapter. Written before the episode is played,
    so the trajectory may not be there yet."""

    __tablename__ = "routes"
    __table_args__ = (Index(None, "round_id", "capability"),)

    trajectory_id: Mapped[Id]
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.id"))
    router_version: Mapped[str]
    capability: Mapped[str]
    adapter_id: Mapped[str | None]
    probabilities: Mapped[Object]
    neighbours: Mapped[Array]
    milliseconds: Mapped[Seconds]


class Conversation(Base):
    """A conversation of the gateway as it stood after its last answer, and what was said of it. With feedback it is
    diagnosis data of the target `traffic`; `conversation` is the name that the client knows it by."""

    __tablename__ = "conversations"
    __table_args__ = (Index(None, "feedback_at"), Index(None, "capability"))

    id: Mapped[Id]
    conversation: Mapped[str]
    target: Mapped[str]
    base: Mapped[str]
    policy_id: Mapped[str]
    capability: Mapped[str]
    adapter: Mapped[str]
    mode: Mapped[str]
    release: Mapped[int | None]
    router_version: Mapped[str]
    probabilities: Mapped[Object]
    routing_milliseconds: Mapped[Seconds]
    messages: Mapped[Array]
    tools: Mapped[Array]
    turns: Mapped[Count]
    prompt_tokens: Mapped[Big]
    sampled_tokens: Mapped[Big]
    seconds: Mapped[Seconds]
    reward: Mapped[float | None]
    success: Mapped[bool | None]
    comment: Mapped[LongText]
    feedback_at: Mapped[Moment]
    created_at: Mapped[Created]
    updated_at: Mapped[Created]


class Reply(Base):
    """A model's reply to an analyst's request, kept with the stage that paid for it; nobody pays for it again."""

    __tablename__ = "replies"

    request_hash: Mapped[Id]
    model: Mapped[str]
    reply: Mapped[Object]
    prompt_tokens: Mapped[Big]
    completion_tokens: Mapped[Big]
    dollars: Mapped[float] = mapped_column(default=0.0)
    created_at: Mapped[Created]


class Spend(Base):
    """What a stage spent on a model."""

    __tablename__ = "spend"
    __table_args__ = (Index(None, "round_id"),)

    id: Mapped[Id]
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.id"))
    stage: Mapped[str]
    model: Mapped[str]
    calls: Mapped[Count]
    prompt_tokens: Mapped[Big]
    sampled_tokens: Mapped[Big]
    dollars: Mapped[float] = mapped_column(default=0.0)
    seconds: Mapped[Seconds]


TABLES = Base.metadata.tables
