"""Variable rates asked for window by window; before, by levels that were taken to last for ever."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_WINDOWS = 64
_FOR_EVER_S = 1e6


def upgrade() -> None:
    connection = op.get_bind()
    for row_id, request in connection.execute(sa.text("SELECT id, request FROM deployments")).all():
        try:
            asked = json.loads(request)
            changed = _as_path(asked) if isinstance(asked, dict) else asked
        except (ValueError, LookupError, TypeError, ZeroDivisionError):
            continue  # it cannot be read, which is reported when it is asked for
        connection.execute(
            sa.text("UPDATE deployments SET request = :request WHERE id = :id"),
            {"id": row_id, "request": json.dumps(changed)},
        )


def _as_path(asked: dict[str, Any]) -> dict[str, Any]:
    levels = asked.pop("rate_levels", [])
    if levels:
        windows = [(level["times"], round(_WINDOWS * level["share"] / level["times"])) for level in levels]
        times = [each for each, often in windows for _ in range(often)]
        mean = sum(times) / len(times)
        asked |= {"rates": [each / mean for each in times], "rate_window_s": _FOR_EVER_S}
    return asked
