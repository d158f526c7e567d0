"""A deployment that is being updated: what it is to become, and the former workers that still finish requests."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_COLUMNS = ("update_request", "update_plan", "update_workers", "draining")
_FIELDS = frozenset({"engine_version", "engine_args", "tool_call_parser", "reasoning_parser"})  # of a request


def upgrade() -> None:
    for name in _COLUMNS:
        op.execute(f"ALTER TABLE deployments ADD COLUMN {name} TEXT")


def downgrade() -> None:
    """Give up an update under way and end its workers.

    A number of requests that memory decides becomes one, and what is said of the engine itself is left out.
    """
    connection = op.get_bind()
    for row_id, request in connection.execute(sa.text("SELECT id, request FROM deployments")).all():
        try:
            asked = {name: value for name, value in json.loads(request).items() if name not in _FIELDS}
        except (ValueError, AttributeError):
            continue  # it cannot be read, which is reported when it is asked for
        if asked.get("batch", 1) is None:
            asked["batch"] = 1
        connection.execute(
            sa.text("UPDATE deployments SET request = :request WHERE id = :id"),
            {"id": row_id, "request": json.dumps(asked)},
        )
    for name in _COLUMNS:
        op.execute(f"ALTER TABLE deployments DROP COLUMN {name}")
