"""Keys by which a deploy that is asked for again is known; texts of people as long as they are."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

# PostgreSQL keeps to a length, SQLite never did: a folder's name, or a label, may be longer than 200 characters.
_TEXTS = (("profiles", "model"), ("verifications", "model"), ("api_keys", "label"))


def upgrade() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(200), primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"])
    for table, column in _TEXTS:
        with op.batch_alter_table(table) as batch:
            batch.alter_column(column, type_=sa.Text, existing_type=sa.String(200), existing_nullable=False)
