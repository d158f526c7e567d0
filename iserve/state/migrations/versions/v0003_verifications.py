"""Checks of running configurations, which correct the estimates of their models."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "verifications",
        sa.Column("shape_hash", sa.String(64), primary_key=True),
        sa.Column("engine", sa.String(40), primary_key=True),
        sa.Column("machine_key", sa.String(64), primary_key=True),
        sa.Column("config", sa.String(200), primary_key=True),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
