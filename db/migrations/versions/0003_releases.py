"""Releases, what decides about them, and the parent of a round. The champions that a home has become release 1, live,
of their target: the newest champion of each capability on the base of the newest of all, with the router of the newest
round that fitted one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Text
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True, astext_type=Text()), "postgresql")
LIVE = sa.text("state = 'live'")
Time = sa.DateTime(timezone=True)


def _table(name: str, /, **types: Any) -> sa.TableClause:
    """The columns of a table that this migration reads or writes; texts unless said otherwise."""
    return sa.table(name, *(sa.column(n, sa.String() if t is str else t) for n, t in types.items()))


ROUNDS = _table("rounds", id=str, number=sa.Integer(), target=str, data_hash=str, started_at=Time, finished_at=Time)
STAGES = _table("stages", round_id=str, name=str, state=str, result=Json)
CAPABILITIES = _table("capabilities", id=str, name=str)
ADAPTERS = _table(
    "adapters",
    id=str,
    round_id=str,
    capability_id=str,
    base=str,
    base_revision=str,
    sha256=str,
    state=str,
    registered_model=str,
    registered_version=str,
)
RELEASES = _table(
    "releases",
    id=str,
    target=str,
    number=sa.Integer(),
    base=str,
    base_revision=str,
    data_hash=str,
    members=Json,
    router=str,
    router_path=str,
    state=str,
    evidence=Json,
    reason=str,
    created_at=Time,
    live_at=Time,
)


def first_releases(connection: sa.Connection) -> Iterator[dict[str, Any]]:
    """The rows of release 1, one a target that has champions. A champion that cannot be in it (on another base, or of
    the same capability as a newer one) is retired, and named in the evidence."""
    champions = (
        sa.select(ADAPTERS, CAPABILITIES.c.name, ROUNDS.c.target, ROUNDS.c.number)
        .add_columns(ROUNDS.c.data_hash, ROUNDS.c.started_at, ROUNDS.c.finished_at)
        .join_from(ADAPTERS, ROUNDS, ROUNDS.c.id == ADAPTERS.c.round_id)
        .join(CAPABILITIES, CAPABILITIES.c.id == ADAPTERS.c.capability_id)
        .where(ADAPTERS.c.state == "champion", ADAPTERS.c.registered_version.is_not(None))
        .order_by(ROUNDS.c.target, ROUNDS.c.number.desc(), ADAPTERS.c.id)
    )
    by_target: dict[str, list[Any]] = {}
    for found in connection.execute(champions):
        by_target.setdefault(found.target, []).append(found)
    for target, rows in by_target.items():
        newest = rows[0]
        members: dict[str, dict[str, str]] = {}
        left_out = []
        for row in rows:
            if row.name in members or (row.base, row.base_revision) != (newest.base, newest.base_revision):
                left_out.append(row.id)
                connection.execute(sa.update(ADAPTERS).where(ADAPTERS.c.id == row.id).values(state="retired"))
                continue
            members[row.name] = {
                "adapter_id": row.id,
                "model": row.registered_model,
                "version": row.registered_version,
                "sha256": row.sha256,
            }
        router, path = _newest_router(connection, target)
        since = newest.finished_at or newest.started_at
        yield {
            "id": _row_id("release", target, 1),
            "target": target,
            "number": 1,
            "base": newest.base,
            "base_revision": newest.base_revision,
            "data_hash": newest.data_hash,
            "members": dict(sorted(members.items())),
            "router": router,
            "router_path": path,
            "state": "live",
            "evidence": {"champions_of": sorted({r.number for r in rows}), "retired": sorted(left_out)},
            "reason": "the champions of a home made before there were releases",
            "created_at": since,
            "live_at": since,
        }


def _newest_router(connection: sa.Connection, target: str) -> tuple[str, str]:
    """Version and folder, relative to the home folder, of the router that was served so far; ("", "") without one."""
    routes = (
        sa.select(ROUNDS.c.id, STAGES.c.result)
        .join_from(ROUNDS, STAGES, STAGES.c.round_id == ROUNDS.c.id)
        .where(ROUNDS.c.target == target, STAGES.c.name == "route", STAGES.c.state == "done")
        .order_by(ROUNDS.c.number.desc())
    )
    for round_id, result in connection.execute(routes):
        if (result or {}).get("version"):
            return str(result["version"]), f"{round_id}/router"
    return "", ""


def _row_id(*parts: Any) -> str:
    text = json.dumps(list(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def upgrade() -> None:
    op.create_table(
        "drawn_tasks",
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("data_hash", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("content", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_drawn_tasks_round_id_rounds")),
        sa.PrimaryKeyConstraint("round_id", "split", "task_id", name=op.f("pk_drawn_tasks")),
    )
    with op.batch_alter_table("drawn_tasks", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_drawn_tasks_target_content"), ["target", "content"], unique=False)

    op.create_table(
        "gate_plans",
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("rules", Json, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_gate_plans_round_id_rounds")),
        sa.PrimaryKeyConstraint("round_id", name=op.f("pk_gate_plans")),
    )
    op.create_table(
        "looks",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("data_hash", sa.String(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("draw", sa.Integer(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_looks_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_looks")),
        sa.UniqueConstraint("round_id", "split", name=op.f("uq_looks_round_id_split")),
    )
    with op.batch_alter_table("looks", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_looks_target_data_hash_split_draw"), ["target", "data_hash", "split", "draw"], unique=False
        )

    op.create_table(
        "releases",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.String(), nullable=True),
        sa.Column("round_id", sa.String(), nullable=True),
        sa.Column("base", sa.String(), nullable=False),
        sa.Column("base_revision", sa.String(), nullable=False),
        sa.Column("data_hash", sa.String(), nullable=False),
        sa.Column("members", Json, nullable=False),
        sa.Column("router", sa.String(), nullable=False),
        sa.Column("router_path", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("evidence", Json, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("live_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["parent_id"], ["releases.id"], name=op.f("fk_releases_parent_id_releases")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_releases_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_releases")),
        sa.UniqueConstraint("target", "number", name=op.f("uq_releases_target_number")),
    )
    with op.batch_alter_table("releases", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_releases_round_id"), ["round_id"], unique=False)
        batch_op.create_index(
            "uq_releases_live",
            ["target"],
            unique=True,
            sqlite_where=sa.text("state = 'live'"),
            postgresql_where=sa.text("state = 'live'"),
        )

    op.create_table(
        "barred",
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("release_id", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("allowed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["release_id"], ["releases.id"], name=op.f("fk_barred_release_id_releases")),
        sa.PrimaryKeyConstraint("target", "sha256", name=op.f("pk_barred")),
    )
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.add_column(sa.Column("parent_id", sa.String(), nullable=True))
    for release in first_releases(op.get_bind()):
        op.bulk_insert(RELEASES, [release])


def downgrade() -> None:
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.drop_column("parent_id")

    op.drop_table("barred")
    with op.batch_alter_table("releases", schema=None) as batch_op:
        batch_op.drop_index("uq_releases_live", sqlite_where=LIVE, postgresql_where=LIVE)
        batch_op.drop_index(batch_op.f("ix_releases_round_id"))

    op.drop_table("releases")
    with op.batch_alter_table("looks", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_looks_target_data_hash_split_draw"))

    op.drop_table("looks")
    op.drop_table("gate_plans")
    with op.batch_alter_table("drawn_tasks", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_drawn_tasks_target_content"))

    op.drop_table("drawn_tasks")
