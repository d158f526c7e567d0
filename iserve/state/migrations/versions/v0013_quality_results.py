"""Results of ``iserve quality``, by the contents that were measured."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "quality_results",
        sa.Column("identity", sa.String(64), primary_key=True),
        sa.Column("variant_hash", sa.String(64), nullable=False),
        sa.Column("weights_stamp", sa.String(64), nullable=False),
        sa.Column("measured_at", sa.Float, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("ix_quality_results_weights_stamp", "quality_results", ["weights_stamp"])
