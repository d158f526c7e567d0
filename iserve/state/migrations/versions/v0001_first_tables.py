"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("directory", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "profiles",
        sa.Column("shape_hash", sa.String(64), primary_key=True),
        sa.Column("engine", sa.String(40), primary_key=True),
        sa.Column("machine_key", sa.String(64), primary_key=True),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "deployments",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("desired", sa.String(20), nullable=False),
        sa.Column("phase", sa.String(20), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("plan", sa.Text),
        sa.Column("worker", sa.Text),
        sa.UniqueConstraint("name", name="uq_deployments_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(40), primary_key=True),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(20), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("revoked", sa.Boolean, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("deployment_id", sa.Integer, sa.ForeignKey("deployments.id", ondelete="CASCADE")),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
    )
    op.create_index("ix_events_deployment_id", "events", ["deployment_id"])
    op.create_table(
        "route_version",
        sa.Column("one", sa.Integer, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
    )
