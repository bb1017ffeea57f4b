"""The column types that the tables share: moments in UTC, JSON payloads, blobs; and the naming of constraints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, LargeBinary, MetaData, Text, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column


def utc_now() -> datetime:
    """The present time, with its zone."""
    return datetime.now(UTC)


class Utc(TypeDecorator[datetime]):
    """A moment in UTC. SQLite keeps no zone, so it is taken off on the way in and put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone; use datetime.now(UTC)")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# none_as_null: an absent payload is SQL NULL, never the JSON text "null".
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

Id = Annotated[str, mapped_column(primary_key=True)]
Big = Annotated[int, mapped_column(BigInteger, default=0)]
Count = Annotated[int, mapped_column(default=0)]
Seconds = Annotated[float, mapped_column(default=0.0)]
LongText = Annotated[str, mapped_column(Text, default="")]
Object = Annotated[dict[str, Any], mapped_column(Json, default=dict)]
Array = Annotated[list[Any], mapped_column(Json, default=list)]
Blob = Annotated[bytes | None, mapped_column(LargeBinary)]
Created = Annotated[datetime, mapped_column(Utc, default=utc_now)]
Moment = Annotated[datetime | None, mapped_column(Utc)]
OfRound = Annotated[str, mapped_column(ForeignKey("rounds.id"))]


class Base(DeclarativeBase):
    """Every constraint has a name, because SQLite's batch migrations can only change what is named."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
