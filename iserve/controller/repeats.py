"""A deploy that is asked for again, its answer lost, is known by its idempotency key and answered as before.

A key is stored in the transaction that accepts the deployment, so a request that was refused, or never came,
leaves none; it outlives the deployment, so that a late repeat does not bring back what was removed meanwhile.
"""

from __future__ import annotations

import time

from pydantic import ValidationError

from fingerprint.codec import from_json, to_json
from fingerprint.errors import ConflictError
from iserve.api_types import DeployBody, DeploymentDocument
from iserve.state.store import KeptAnswer, Store

__all__ = ["KEPT_S", "answer_to_keep", "answered_before"]

KEPT_S = 86_400.0
_SHOWN = 500  # characters of the former request


def answered_before(store: Store, key: str, body: DeployBody) -> DeploymentDocument | None:
    """What the request that came with ``key`` in the last 24 hours was answered; None when there was none.

    Raises:
        ConflictError: it asked for something else.
    """
    kept = store.kept_answer(key, made_after=time.time() - KEPT_S)
    if kept is None:
        return None
    try:
        former: DeployBody | None = DeployBody.model_validate_json(kept.request)
    except ValidationError:  # of an iServe of another version, and so not known to be the same
        former = None
    if former != body:
        asked = kept.request if former is None else former.model_dump_json(exclude_defaults=True)
        raise ConflictError(
            f"the Idempotency-Key {key!r} came {max(0.0, time.time() - kept.created_at):.0f} s ago with another "
            f"request: {asked[:_SHOWN]}; send that one again, or take a new key"
        )
    return from_json(kept.answer, DeploymentDocument, what="the kept answer")


def answer_to_keep(key: str, body: DeployBody, answer: DeploymentDocument) -> KeptAnswer:
    """``answer`` to ``body``, as it is stored."""
    return KeptAnswer(
        key=key,
        created_at=answer.created_at,
        request=body.model_dump_json(),
        answer=to_json(answer).decode(),
    )
