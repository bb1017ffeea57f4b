"""Accounts of methods, and the episodes that were charged to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "method_accounts",
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("episodes", sa.Integer(), nullable=False),
        sa.Column(
            "inherits",
            sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql"),
            nullable=False,
        ),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("dollars", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("method", name=op.f("pk_method_accounts")),
    )
    op.create_table(
        "episode_charges",
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["method"], ["method_accounts.method"], name=op.f("fk_episode_charges_method_method_accounts")
        ),
        sa.PrimaryKeyConstraint("method", "trajectory_id", name=op.f("pk_episode_charges")),
    )
    with op.batch_alter_table("episode_charges", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_episode_charges_trajectory_id"), ["trajectory_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("episode_charges", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_episode_charges_trajectory_id"))

    op.drop_table("episode_charges")
    op.drop_table("method_accounts")
