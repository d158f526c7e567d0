"""Verifications by the names that their fields have now."""

import json
from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_KEY = ("shape_hash", "engine", "machine_key", "config")
_NAMES = {"room": "launch_workload", "alone": "single_request"}


def upgrade() -> None:
    _rename(_NAMES)


def downgrade() -> None:
    _rename({new: old for old, new in _NAMES.items()})


def _rename(names: Mapping[str, str]) -> None:
    connection, where = op.get_bind(), " AND ".join(f"{column} = :{column}" for column in _KEY)
    for row in connection.execute(sa.text(f"SELECT {', '.join(_KEY)}, body FROM verifications")).mappings().all():
        try:
            body = {names.get(key, key): value for key, value in json.loads(row["body"]).items()}
        except (AttributeError, ValueError):
            continue  # no JSON object: it counts as absent
        update = sa.text(f"UPDATE verifications SET body = :body WHERE {where}")
        connection.execute(update, {**row, "body": json.dumps(body)})
