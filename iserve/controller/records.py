"""What a deployment's row holds, as values. One that an iServe of another version wrote may be beyond reading:
that is one deployment's trouble, never that of the others."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from daemon.engines.base import WorkerSpec
from fingerprint.codec import from_json
from fingerprint.errors import BadInputError, ConfigError
from iserve.api_types import DeployBody
from iserve.state.store import DeploymentRow

__all__ = ["recorded_wish", "recorded_workers"]

log = logging.getLogger(__name__)


def recorded_wish(row: DeploymentRow) -> DeployBody:
    """What was asked for.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return DeployBody.model_validate_json(row.request)
    except ValidationError as error:
        raise ConfigError(
            f"what was asked for {row.name} was recorded by another version of iServe and cannot be read "
            f"({error.error_count()} faults); remove the deployment and deploy it again"
        ) from error


def recorded_workers(row: DeploymentRow) -> tuple[WorkerSpec, ...]:
    """The workers that were chosen, one for each replica; none before that, and where they cannot be read: then
    they are chosen anew."""
    if row.workers is None:
        return ()
    try:
        return from_json(row.workers, tuple[WorkerSpec, ...], what=f"the recorded workers of {row.name}")
    except BadInputError as error:
        log.warning("%s", error)
        return ()
