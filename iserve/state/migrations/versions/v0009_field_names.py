"""Requests, plans, statuses and events by the names that the REST API has for them now."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_REQUEST = {"expect": "expected_deployments", "rates": "relative_rates", "refuse_late": "reject_late"}
_ANSWER = {"refuses_late": "rejects_late"}
_PLAN = {
    "relax": "relaxations",
    "relax_together": "combined_relaxation",
    "relax_first": "first_relaxation",
    "served": "load_forecast",
    "times": "relative_rate",
    "alone": "single_request",
    "rests_on": "measured_config",
    "alike": "equivalent",
    "kept": "cache_sizes",
}
_STATUS = {"asleep": "scaled-to-zero", "waking": "scaling-up"}


def upgrade() -> None:
    for column in ("request", "update_request"):
        _rewrite("deployments", "id", column, lambda document: _own_keys(document, _REQUEST))
    for column in ("plan", "update_plan"):
        _rewrite("deployments", "id", column, lambda document: _all_keys(document, _PLAN))
    _rewrite("idempotency_keys", "key", "request", lambda document: _own_keys(document, _REQUEST))
    _rewrite("idempotency_keys", "key", "answer", lambda document: _own_keys(document, _ANSWER))
    for old, new in _STATUS.items():
        for table, column in (("deployments", "phase"), ("events", "kind")):
            change = sa.text(f"UPDATE {table} SET {column} = :new WHERE {column} = :old")
            op.get_bind().execute(change, {"old": old, "new": new})


def _rewrite(table: str, key: str, column: str, change: Callable[[Any], Any]) -> None:
    connection = op.get_bind()
    query = sa.text(f"SELECT {key}, {column} FROM {table} WHERE {column} IS NOT NULL")
    for row_key, text in connection.execute(query).all():
        try:
            changed = json.dumps(change(json.loads(text)))
        except ValueError:
            continue  # it cannot be read, which is reported when it is needed
        update = sa.text(f"UPDATE {table} SET {column} = :changed WHERE {key} = :key")
        connection.execute(update, {"key": row_key, "changed": changed})


def _own_keys(document: Any, names: Mapping[str, str]) -> Any:
    """Return ``document`` with its own keys renamed, and not those within it, such as an engine's options."""
    return (
        {names.get(key, key): value for key, value in document.items()} if isinstance(document, dict) else document
    )


def _all_keys(document: Any, names: Mapping[str, str]) -> Any:
    if isinstance(document, dict):
        return {names.get(key, key): _all_keys(value, names) for key, value in document.items()}
    return [_all_keys(item, names) for item in document] if isinstance(document, list) else document
