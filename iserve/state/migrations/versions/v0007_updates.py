"""A deployment that is being updated: what it is to become, and the former workers that still finish requests."""

from alembic import op

revision = "0007"
down_revision = "0006"

_COLUMNS = ("update_request", "update_plan", "update_workers", "draining")


def upgrade() -> None:
    for name in _COLUMNS:
        op.execute(f"ALTER TABLE deployments ADD COLUMN {name} TEXT")
