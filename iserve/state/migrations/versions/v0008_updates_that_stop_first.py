"""An update that ends the former workers before the new ones start."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.execute("ALTER TABLE deployments ADD COLUMN update_stop_first BOOLEAN")
