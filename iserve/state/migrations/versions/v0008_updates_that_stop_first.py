"""An update that ends the former workers before the new ones start."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_UNDER_WAY = "phase IN ('draining', 'replacing', 'restoring')"


def upgrade() -> None:
    op.execute("ALTER TABLE deployments ADD COLUMN update_stop_first BOOLEAN")


def downgrade() -> None:
    """Give up such an update that is under way: its deployment is started as it was."""
    given_up = "phase = 'launching', update_request = NULL, update_plan = NULL, update_workers = NULL"
    op.execute(f"UPDATE deployments SET {given_up} WHERE {_UNDER_WAY}")
    op.execute("ALTER TABLE deployments DROP COLUMN update_stop_first")
