"""Variable rates asked for window by window; before, by levels that were taken to last for ever."""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_WINDOWS = 64
_FOR_EVER_S = 1e6


def upgrade() -> None:
    _rewrite(_as_path)


def downgrade() -> None:
    """Replace what was asked for window by window, which has no levels, by a steady rate."""
    _rewrite(_steady)


def _rewrite(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    connection = op.get_bind()
    for row_id, request in connection.execute(sa.text("SELECT id, request FROM deployments")).all():
        try:
            asked = json.loads(request)
            changed = change(asked) if isinstance(asked, dict) else asked
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


def _steady(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in ("rates", "rate_window_s")}
