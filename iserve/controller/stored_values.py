"""Values of a deployment's row. A value that an iServe of another version wrote may be unreadable.

That is one deployment's trouble, never that of the rest.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from daemon.worker_spec import WorkerSpec
from fingerprint.codec import from_json
from fingerprint.errors import BadInputError, ConfigError
from iserve.api_types import DeployBody
from iserve.state.store import DeploymentRow

__all__ = [
    "DRAINING",
    "REPLACING",
    "RESTORING",
    "SCALED_TO_ZERO",
    "SCALING_UP",
    "SERVED_PHASES",
    "STARTED_SOON_PHASES",
    "draining_workers",
    "is_routed",
    "read_request",
    "recorded_request",
    "recorded_update",
    "recorded_workers",
    "update_workers",
]

# Phases of a deployment with --scale-to-zero.
SCALED_TO_ZERO = "scaled-to-zero"  # its workers have ended, or end once they have no request left
SCALING_UP = "scaling-up"  # requests wait, and its workers start

# Phases of an update that ends the former workers first.
DRAINING = "draining"  # the gateway sends nothing to the former workers, which finish what they have
REPLACING = "replacing"  # they end, and the new ones start
RESTORING = "restoring"  # the new ones did not start: they end, and the former ones start again

SERVED_PHASES = frozenset({"launching", "ready", SCALING_UP})  # a worker is there, or about to be
# Its clients wait for as long as a start may take.
STARTED_SOON_PHASES = frozenset({SCALED_TO_ZERO, SCALING_UP, DRAINING, REPLACING, RESTORING})

log = logging.getLogger(__name__)


_REQUESTS: TypeAdapter[DeployBody] = TypeAdapter(DeployBody)


def read_request(recorded: str) -> DeployBody:
    """Return the deploy request that was stored.

    Raises:
        ValidationError: it cannot be read, as that of another version may be.
    """
    return _REQUESTS.validate_json(recorded)


def recorded_request(row: DeploymentRow) -> DeployBody:
    """Return what was asked for.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_request(row.request)
    except ValidationError as error:
        raise ConfigError(
            f"what was asked for {row.name} was recorded by another version of iServe and cannot be read "
            f"({error.error_count()} faults); remove the deployment and deploy it again"
        ) from error


def recorded_update(row: DeploymentRow) -> DeployBody:
    """Return what it is being updated to.

    Raises:
        ConfigError: it cannot be read.
    """
    return recorded_request(replace(row, request=row.update_request or ""))


def recorded_workers(row: DeploymentRow) -> tuple[WorkerSpec, ...]:
    """Return the workers that were chosen, one for each replica; none before that, and where they cannot be read:
    then they are chosen anew.
    """
    return _workers_of(row, row.workers)


def update_workers(row: DeploymentRow) -> tuple[WorkerSpec, ...]:
    """Return the workers that an update under way has chosen, likewise."""
    return _workers_of(row, row.update_workers)


def draining_workers(row: DeploymentRow) -> tuple[WorkerSpec, ...]:
    """Return the workers of before the last update that still finish requests."""
    return _workers_of(row, row.draining)


def is_routed(row: DeploymentRow) -> bool:
    """Return whether the gateway takes requests for a deployment, as far as its row says."""
    return row.desired == "running" and row.phase in SERVED_PHASES | STARTED_SOON_PHASES


def _workers_of(row: DeploymentRow, recorded: str | None) -> tuple[WorkerSpec, ...]:
    if recorded is None:
        return ()
    try:
        return from_json(recorded, tuple[WorkerSpec, ...], what=f"the recorded workers of {row.name}")
    except BadInputError as error:
        log.warning("%s", error)
        return ()
