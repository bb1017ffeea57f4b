"""The first schema: all tables of a round, from its rollouts to its verdicts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "replies",
        sa.Column("request_hash", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("reply", Json, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("dollars", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("request_hash", name=op.f("pk_replies")),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("data_hash", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("profile", sa.String(), nullable=False),
        sa.Column("config", Json, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("peak_gib", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
        sa.UniqueConstraint("number", name=op.f("uq_rounds_number")),
    )
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_rounds_target_state"), ["target", "state"], unique=False)

    op.create_table(
        "capabilities",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("analyst", sa.String(), nullable=False),
        sa.Column("examples", Json, nullable=False),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_capabilities_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_capabilities")),
        sa.UniqueConstraint("round_id", "name", name=op.f("uq_capabilities_round_id_name")),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("n_tasks", sa.Integer(), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.Column("success", sa.Double(), nullable=True),
        sa.Column("low", sa.Double(), nullable=True),
        sa.Column("high", sa.Double(), nullable=True),
        sa.Column("detail", Json, nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_evaluations_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
    )
    with op.batch_alter_table("evaluations", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_evaluations_round_id_split"), ["round_id", "split"], unique=False)

    op.create_table(
        "routes",
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=True),
        sa.Column("router_version", sa.String(), nullable=False),
        sa.Column("capability", sa.String(), nullable=False),
        sa.Column("adapter_id", sa.String(), nullable=True),
        sa.Column("probabilities", Json, nullable=False),
        sa.Column("neighbours", Json, nullable=False),
        sa.Column("milliseconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_routes_round_id_rounds")),
        sa.PrimaryKeyConstraint("trajectory_id", name=op.f("pk_routes")),
    )
    with op.batch_alter_table("routes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_routes_round_id_capability"), ["round_id", "capability"], unique=False)

    op.create_table(
        "spend",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=True),
        sa.Column("stage", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("calls", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("dollars", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_spend_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_spend")),
    )
    with op.batch_alter_table("spend", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_spend_round_id"), ["round_id"], unique=False)

    op.create_table(
        "stages",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("result", Json, nullable=True),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_stages_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stages")),
        sa.UniqueConstraint("round_id", "name", name=op.f("uq_stages_round_id_name")),
    )
    op.create_table(
        "trajectories",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=True),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("data_hash", sa.String(), nullable=False),
        sa.Column("environment", sa.String(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("split", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("base", sa.String(), nullable=False),
        sa.Column("adapter_id", sa.String(), nullable=True),
        sa.Column("group_id", sa.String(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("termination", sa.String(), nullable=False),
        sa.Column("error_boundary", sa.String(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("n_steps", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("metrics", Json, nullable=False),
        sa.Column("messages", Json, nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=True),
        sa.Column("sampled_mask", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "error_boundary IS NULL OR (reward IS NULL AND success IS NULL)",
            name=op.f("ck_trajectories_error_has_no_reward"),
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_trajectories_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trajectories")),
    )
    with op.batch_alter_table("trajectories", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_trajectories_adapter_id"), ["adapter_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_trajectories_environment"), ["environment"], unique=False)
        batch_op.create_index(batch_op.f("ix_trajectories_policy_id"), ["policy_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_trajectories_round_id_purpose"), ["round_id", "purpose"], unique=False)
        batch_op.create_index(batch_op.f("ix_trajectories_target_task_id"), ["target", "task_id"], unique=False)

    op.create_table(
        "checks",
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("idx", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("required", sa.Boolean(), nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_checks_trajectory_id_trajectories")
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "idx", name=op.f("pk_checks")),
    )
    with op.batch_alter_table("checks", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_checks_kind"), ["kind"], unique=False)

    op.create_table(
        "labels",
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("capability_id", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("request_hash", sa.String(), nullable=True),
        sa.CheckConstraint("label IN ('NA', 'PRESENT', 'LACKING')", name=op.f("ck_labels_label_known")),
        sa.ForeignKeyConstraint(
            ["capability_id"], ["capabilities.id"], name=op.f("fk_labels_capability_id_capabilities")
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_labels_round_id_rounds")),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_labels_trajectory_id_trajectories")
        ),
        sa.PrimaryKeyConstraint("round_id", "run", "trajectory_id", "capability_id", name=op.f("pk_labels")),
    )
    with op.batch_alter_table("labels", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_labels_capability_id_label"), ["capability_id", "label"], unique=False)
        batch_op.create_index(batch_op.f("ix_labels_trajectory_id"), ["trajectory_id"], unique=False)

    op.create_table(
        "selections",
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("capability_id", sa.String(), nullable=False),
        sa.Column("selected", sa.Boolean(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("mean_cov", sa.Double(), nullable=True),
        sa.Column("std_cov", sa.Double(), nullable=True),
        sa.Column("mean_delta", sa.Double(), nullable=True),
        sa.Column("std_delta", sa.Double(), nullable=True),
        sa.Column("runs_passed", sa.Integer(), nullable=False),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.Column("kappa", sa.Double(), nullable=True),
        sa.Column("evidence", Json, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["capability_id"], ["capabilities.id"], name=op.f("fk_selections_capability_id_capabilities")
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_selections_round_id_rounds")),
        sa.PrimaryKeyConstraint("round_id", "capability_id", name=op.f("pk_selections")),
    )
    op.create_table(
        "steps",
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("idx", sa.Integer(), nullable=False),
        sa.Column("action", Json, nullable=False),
        sa.Column("observation", Json, nullable=False),
        sa.Column("sampled_tokens", sa.Integer(), nullable=False),
        sa.Column("milliseconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_steps_trajectory_id_trajectories")
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "idx", name=op.f("pk_steps")),
    )
    op.create_table(
        "synthesized_environments",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("capability_id", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("spec", Json, nullable=False),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("code_hash", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("sandbox_level", sa.String(), nullable=False),
        sa.Column("verdicts", Json, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["capability_id"], ["capabilities.id"], name=op.f("fk_synthesized_environments_capability_id_capabilities")
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_synthesized_environments_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_synthesized_environments")),
    )
    with op.batch_alter_table("synthesized_environments", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_synthesized_environments_capability_id_version"), ["capability_id", "version"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_synthesized_environments_round_id"), ["round_id"], unique=False)

    op.create_table(
        "verdicts",
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("capability_id", sa.String(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("points", sa.Double(), nullable=True),
        sa.Column("p", sa.Double(), nullable=True),
        sa.Column("p_holm", sa.Double(), nullable=True),
        sa.Column("mde", sa.Double(), nullable=True),
        sa.Column("reasons", Json, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["capability_id"], ["capabilities.id"], name=op.f("fk_verdicts_capability_id_capabilities")
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_verdicts_round_id_rounds")),
        sa.PrimaryKeyConstraint("round_id", "subject", name=op.f("pk_verdicts")),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String(), nullable=False),
        sa.Column("capability_id", sa.String(), nullable=True),
        sa.Column("environment_id", sa.String(), nullable=True),
        sa.Column("base", sa.String(), nullable=False),
        sa.Column("base_revision", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("registered_model", sa.String(), nullable=True),
        sa.Column("registered_version", sa.String(), nullable=True),
        sa.Column("base_success", sa.Double(), nullable=True),
        sa.Column("adapter_success", sa.Double(), nullable=True),
        sa.Column("config", Json, nullable=False),
        sa.Column("metrics", Json, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["capability_id"], ["capabilities.id"], name=op.f("fk_adapters_capability_id_capabilities")
        ),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["synthesized_environments.id"],
            name=op.f("fk_adapters_environment_id_synthesized_environments"),
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_adapters_round_id_rounds")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
    )
    with op.batch_alter_table("adapters", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_adapters_capability_id"), ["capability_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_adapters_round_id"), ["round_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_adapters_state"), ["state"], unique=False)

    op.create_table(
        "calibrations",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("environment_id", sa.String(), nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("seeds", sa.Integer(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("mean_reward", sa.Double(), nullable=True),
        sa.Column("success_rate", sa.Double(), nullable=True),
        sa.Column("std_reward", sa.Double(), nullable=True),
        sa.Column("all_success", sa.Double(), nullable=True),
        sa.Column("all_zero", sa.Double(), nullable=True),
        sa.Column("informative", sa.Double(), nullable=True),
        sa.Column("low", sa.Double(), nullable=True),
        sa.Column("high", sa.Double(), nullable=True),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", Json, nullable=False),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["synthesized_environments.id"],
            name=op.f("fk_calibrations_environment_id_synthesized_environments"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calibrations")),
    )
    with op.batch_alter_table("calibrations", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_calibrations_environment_id"), ["environment_id"], unique=False)

    op.create_table(
        "training_steps",
        sa.Column("adapter_id", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("success", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("clip_fraction", sa.Double(), nullable=True),
        sa.Column("kl", sa.Double(), nullable=True),
        sa.Column("logprob_gap", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("metrics", Json, nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_training_steps_adapter_id_adapters")),
        sa.PrimaryKeyConstraint("adapter_id", "step", name=op.f("pk_training_steps")),
    )


def downgrade() -> None:
    op.drop_table("training_steps")
    with op.batch_alter_table("calibrations", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_calibrations_environment_id"))

    op.drop_table("calibrations")
    with op.batch_alter_table("adapters", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_adapters_state"))
        batch_op.drop_index(batch_op.f("ix_adapters_round_id"))
        batch_op.drop_index(batch_op.f("ix_adapters_capability_id"))

    op.drop_table("adapters")
    op.drop_table("verdicts")
    with op.batch_alter_table("synthesized_environments", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_synthesized_environments_round_id"))
        batch_op.drop_index(batch_op.f("ix_synthesized_environments_capability_id_version"))

    op.drop_table("synthesized_environments")
    op.drop_table("steps")
    op.drop_table("selections")
    with op.batch_alter_table("labels", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_labels_trajectory_id"))
        batch_op.drop_index(batch_op.f("ix_labels_capability_id_label"))

    op.drop_table("labels")
    with op.batch_alter_table("checks", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_checks_kind"))

    op.drop_table("checks")
    with op.batch_alter_table("trajectories", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_trajectories_target_task_id"))
        batch_op.drop_index(batch_op.f("ix_trajectories_round_id_purpose"))
        batch_op.drop_index(batch_op.f("ix_trajectories_policy_id"))
        batch_op.drop_index(batch_op.f("ix_trajectories_environment"))
        batch_op.drop_index(batch_op.f("ix_trajectories_adapter_id"))

    op.drop_table("trajectories")
    op.drop_table("stages")
    with op.batch_alter_table("spend", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_spend_round_id"))

    op.drop_table("spend")
    with op.batch_alter_table("routes", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_routes_round_id_capability"))

    op.drop_table("routes")
    with op.batch_alter_table("evaluations", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_evaluations_round_id_split"))

    op.drop_table("evaluations")
    op.drop_table("capabilities")
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_rounds_target_state"))

    op.drop_table("rounds")
    op.drop_table("replies")
