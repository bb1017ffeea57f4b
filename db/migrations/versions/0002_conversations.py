"""Conversations of the gateway, with feedback."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("conversation", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("base", sa.String(), nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("capability", sa.String(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=False),
        sa.Column("mode", sa.String(), nullable=False),
        sa.Column("router_version", sa.String(), nullable=False),
        sa.Column("probabilities", Json, nullable=False),
        sa.Column("routing_milliseconds", sa.Double(), nullable=False),
        sa.Column("messages", Json, nullable=False),
        sa.Column("tools", Json, nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("feedback_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversations")),
    )
    op.create_index(op.f("ix_conversations_feedback_at"), "conversations", ["feedback_at"], unique=False)
    op.create_index(op.f("ix_conversations_capability"), "conversations", ["capability"], unique=False)


def downgrade() -> None:
    op.drop_table("conversations")
