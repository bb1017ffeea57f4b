"""The tables of a comparison of methods: who pays for which episode, and what a method has taken besides."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from db.values.types import Array, Base, Created, Id, Seconds


class MethodAccount(Base):
    """One method's account of episodes. `episodes` is the most that may be charged; `inherits` names accounts whose
    episodes, seconds and dollars are this one's, too. `seconds` and `dollars` are its own."""

    __tablename__ = "method_accounts"

    method: Mapped[Id]
    episodes: Mapped[int]
    inherits: Mapped[Array]
    seconds: Mapped[Seconds]
    dollars: Mapped[float] = mapped_column(default=0.0)
    created_at: Mapped[Created]


class EpisodeCharge(Base):
    """An episode that a method asked for, by the id of its trajectory, charged before it is played (no foreign key).
    `purpose` "test" is the final measurement, which no budget pays for."""

    __tablename__ = "episode_charges"
    __table_args__ = (Index(None, "trajectory_id"),)

    method: Mapped[str] = mapped_column(ForeignKey("method_accounts.method"), primary_key=True)
    trajectory_id: Mapped[Id]
    purpose: Mapped[str]
    created_at: Mapped[Created]
