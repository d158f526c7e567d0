"""LoRA variants that are registered for a base model."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "variants",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("base_directory", sa.Text, nullable=False),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("max_rank", sa.Integer, nullable=False),
        sa.Column("num_modules", sa.Integer, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("trained_on", sa.Text),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
