"""A deployment has several workers: what was one worker's JSON is a list of them."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # Renamed in place: SQLite would copy and drop the table else, and the events of all deployments with it.
    op.execute("ALTER TABLE deployments RENAME COLUMN worker TO workers")
    op.execute("UPDATE deployments SET workers = '[' || workers || ']' WHERE workers IS NOT NULL")
