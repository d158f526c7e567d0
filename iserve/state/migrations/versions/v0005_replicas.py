"""A deployment has several workers: what was one worker's JSON is a list of them."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Renamed in place: SQLite would copy and drop the table else, and the events of all deployments with it.
    op.execute("ALTER TABLE deployments RENAME COLUMN worker TO workers")
    op.execute("UPDATE deployments SET workers = '[' || workers || ']' WHERE workers IS NOT NULL")


def downgrade() -> None:
    """Keep the first of several workers; the rest then have no owner, and are ended."""
    connection = op.get_bind()
    kept = sa.text("SELECT id, workers FROM deployments WHERE workers IS NOT NULL")
    for deployment_id, workers in connection.execute(kept).all():
        connection.execute(
            sa.text("UPDATE deployments SET workers = :worker WHERE id = :id"),
            {"id": deployment_id, "worker": _first(workers)},
        )
    op.execute("ALTER TABLE deployments RENAME COLUMN workers TO worker")


def _first(workers: str) -> str | None:
    """Return the first; None where it cannot be read: it is chosen anew."""
    try:
        return json.dumps(json.loads(workers)[0])
    except (ValueError, LookupError, TypeError):
        return None
