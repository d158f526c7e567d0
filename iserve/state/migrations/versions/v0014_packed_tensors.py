"""Bytes of variants on disk: their tensors may be packed, which those that were added before are not."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("variants", sa.Column("disk_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.execute("UPDATE variants SET disk_bytes = num_bytes")
