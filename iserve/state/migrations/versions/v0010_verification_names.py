"""Verifications by the names that their fields have now."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_KEY = ("shape_hash", "engine", "machine_key", "config")
_NAMES = {"room": "launch_workload", "alone": "single_request"}


def upgrade() -> None:
    connection, where = op.get_bind(), " AND ".join(f"{column} = :{column}" for column in _KEY)
    for row in connection.execute(sa.text(f"SELECT {', '.join(_KEY)}, body FROM verifications")).mappings().all():
        try:
            body = {_NAMES.get(key, key): value for key, value in json.loads(row["body"]).items()}
        except (AttributeError, ValueError):
            continue  # no JSON object: it counts as absent
        update = sa.text(f"UPDATE verifications SET body = :body WHERE {where}")
        connection.execute(update, {**row, "body": json.dumps(body)})
