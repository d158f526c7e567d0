"""Deployments and events never get the id of one that was deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Copy both tables into new ones; SQLite cannot change how a table gives out its ids. PostgreSQL's sequences
    never give out one twice.

    The events are set aside first: dropping the deployments would delete theirs.
    """
    if op.get_bind().dialect.name != "sqlite":
        return
    op.execute("CREATE TABLE events_kept AS SELECT * FROM events")
    op.drop_table("events")
    op.execute("CREATE TABLE deployments_kept AS SELECT * FROM deployments")
    op.drop_table("deployments")
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
        sqlite_autoincrement=True,
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("deployment_id", sa.Integer, sa.ForeignKey("deployments.id", ondelete="CASCADE")),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    for table in ("deployments", "events"):
        op.execute(f"INSERT INTO {table} SELECT * FROM {table}_kept")
        op.drop_table(f"{table}_kept")
    op.create_index("ix_events_deployment_id", "events", ["deployment_id"])
