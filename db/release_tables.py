"""The tables of what answers users, and of what was played to decide it: releases, barred adapters, looks at a split,
drawn tasks, plans of the gate."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from db.values.types import Base, Created, Id, LongText, Moment, Object, OfRound

_LIVE = text("state = 'live'")


class Release(Base):
    """What answers the users of a target: base, one adapter version a capability, and the router fitted for these.
    `number` counts 1, 2, 3 per target. Only `state`, `reason`, `evidence`, `live_at` and `ended_at` ever change."""

    __tablename__ = "releases"
    __table_args__ = (
        UniqueConstraint("target", "number"),
        # At most one live release a target, whoever writes.
        Index("uq_releases_live", "target", unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE),
        Index(None, "round_id"),
    )

    id: Mapped[Id]
    target: Mapped[str]
    number: Mapped[int]
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("releases.id"))
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.id"))
    base: Mapped[str]
    base_revision: Mapped[str] = mapped_column(default="")
    data_hash: Mapped[str]
    members: Mapped[Object]
    router: Mapped[str] = mapped_column(default="")
    router_path: Mapped[str] = mapped_column(default="")
    state: Mapped[str]
    evidence: Mapped[Object]
    reason: Mapped[LongText]
    created_at: Mapped[Created]
    live_at: Mapped[Moment]
    ended_at: Mapped[Moment]


class Barred(Base):
    """An adapter, by its digest, that may not be promoted without a person; `allowed_at` is when one allowed it."""

    __tablename__ = "barred"

    target: Mapped[Id]
    sha256: Mapped[Id]
    release_id: Mapped[str] = mapped_column(ForeignKey("releases.id"))
    reason: Mapped[LongText]
    since: Mapped[Created]
    allowed_at: Mapped[Moment]


class Look(Base):
    """One round's look at a split: the `number`-th at these tasks, and the alpha that it may spend. `draw` is 0 for the
    fixed split, else the number of the round that drew the tasks."""

    __tablename__ = "looks"
    __table_args__ = (UniqueConstraint("round_id", "split"), Index(None, "target", "data_hash", "split", "draw"))

    id: Mapped[Id]
    target: Mapped[str]
    data_hash: Mapped[str]
    split: Mapped[str]
    draw: Mapped[int]
    round_id: Mapped[OfRound]
    number: Mapped[int]
    alpha: Mapped[float]
    created_at: Mapped[Created]


class DrawnTask(Base):
    """A task that a round drew. `content` is the hash of opening and reference: later rounds draw no equal one."""

    __tablename__ = "drawn_tasks"
    __table_args__ = (Index(None, "target", "content"),)

    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    split: Mapped[Id]
    task_id: Mapped[Id]
    target: Mapped[str]
    data_hash: Mapped[str]
    family: Mapped[str]
    content: Mapped[str]


class GatePlan(Base):
    """The rules of a round's gate as they stood before its first evaluation episode, with their hash."""

    __tablename__ = "gate_plans"

    round_id: Mapped[str] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    sha256: Mapped[str]
    rules: Mapped[Object]
    created_at: Mapped[Created]
