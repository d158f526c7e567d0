"""Plans without the interference of each candidate, which is counted in joint plans alone."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_GONE = {"slowdown", "ranked_by", "ranked_low", "ranked_high"}


def upgrade() -> None:
    connection = op.get_bind()
    for column in ("plan", "update_plan"):
        query = sa.text(f"SELECT id, {column} FROM deployments WHERE {column} IS NOT NULL")
        for row_id, text in connection.execute(query).all():
            try:
                changed = json.dumps(_without(json.loads(text)))
            except (AttributeError, KeyError, TypeError, ValueError):
                continue  # it cannot be read, which is reported when it is needed
            update = sa.text(f"UPDATE deployments SET {column} = :changed WHERE id = :id")
            connection.execute(update, {"changed": changed, "id": row_id})


def _without(plan: dict[str, Any]) -> dict[str, Any]:
    """Return ``plan`` whose candidates have no such fields."""
    candidates = [
        {key: value for key, value in one.items() if key not in _GONE} for one in plan.get("candidates", [])
    ]
    return {**plan, "candidates": candidates}
