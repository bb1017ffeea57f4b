"""The table of shards: parts of the episodes that a stage owes, which any worker may play under a lease."""

from __future__ import annotations

from sqlalchemy import Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.values.types import Base, Count, Created, Id, Moment, Object, OfRound


class Shard(Base):
    """Episodes that one worker plays. `part` names what they are a part of; `work` is all that a worker has to know,
    emptied when it is done. Who holds it until when stands as in `stages`; which episodes are stored is known by
    `trajectories` alone."""

    __tablename__ = "shards"
    __table_args__ = (UniqueConstraint("part", "number"), Index(None, "round_id", "state"))

    id: Mapped[Id]
    round_id: Mapped[OfRound]
    part: Mapped[str]
    number: Mapped[int]
    episodes: Mapped[Count]
    state: Mapped[str] = mapped_column(default="pending")
    owner: Mapped[str | None]
    lease_until: Mapped[Moment]
    heartbeat_at: Mapped[Moment]
    attempt: Mapped[Count]
    work: Mapped[Object]
    created_at: Mapped[Created]
    finished_at: Mapped[Moment]
