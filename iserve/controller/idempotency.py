"""Repeated deploy requests: known by their idempotency key, or by the deployment that the same request made.

A key is stored in the transaction that accepts the deployment, so a request that was refused, or never arrived,
leaves none; it outlives the deployment, so that a late repeat does not bring back what was removed meanwhile.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from pydantic import ValidationError

from fingerprint.codec import from_json, to_builtins, to_json
from fingerprint.errors import ConflictError
from iserve.api_documents import DeploymentDocument
from iserve.api_types import DeployBody
from iserve.controller.stored_values import read_request, recorded_request
from iserve.demo import DEMO_MODEL_NAME
from iserve.rest_bodies import UpdateBody
from iserve.state.store import DeploymentRow, KeptAnswer, Store

__all__ = ["KEPT_S", "answer_to_keep", "answered_before", "deployed_before"]

KEPT_S = 86_400.0
_SHOWN = 500  # characters of the former request
_VALUE_SHOWN = 80  # ... and of one of its values
_SINCE_BATCH_MAY_BE_NULL = "engine_args"  # a recorded request without this field has batch 1 where none was given


def answered_before(store: Store, key: str, body: DeployBody) -> DeploymentDocument | None:
    """Return the answer to the request with ``key`` in the last 24 hours; None when there was none.

    Raises:
        ConflictError: it asked for something else.
    """
    kept = store.kept_answer(key, made_after=time.time() - KEPT_S)
    if kept is None:
        return None
    try:
        former: DeployBody | None = read_request(kept.request)
    except ValidationError:  # of an iServe of another version, and so not known to be the same
        former = None
    if former != body:
        asked = kept.request if former is None else to_json(former.given()).decode()
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
        request=to_json(body).decode(),
        answer=to_json(answer).decode(),
    )


def deployed_before(store: Store, name: str, body: DeployBody) -> DeploymentRow | None:
    """Return the deployment called ``name`` if the same request made it; None when there is none of that name.

    Raises:
        ConflictError: another request made it, or it is being removed; the message says what differs and what to
            do.
    """
    row = next((row for row in store.deployments() if row.name == name), None)
    if row is None:
        return None
    if row.desired == "removed":
        raise ConflictError(f"{name} is being removed; deploy it again when `iserve ps` no longer lists it")
    there, asked = _asked(recorded_request(row)), _asked(body)
    if asked["batch"] is None and there["batch"] == 1 and _SINCE_BATCH_MAY_BE_NULL not in json.loads(row.request):
        there["batch"] = None
    differing = [field for field in asked if asked[field] != there[field]]
    if differing:
        told = "; ".join(
            f"{field} is {_shown(there[field], field)}, asked {_shown(asked[field], field)}" for field in differing
        )
        update = f"`iserve update {name}` changes it, " if set(differing) <= set(UpdateBody.model_fields) else ""
        raise ConflictError(
            f"a deployment named {name!r} exists already ({row.phase}) and differs from the request: {told}; "
            f"{update}`iserve rm {name}` ends it, another --name deploys next to it"
        )
    return row


def _asked(body: DeployBody) -> dict[str, object]:
    """Return the fields of a request that say what is deployed; left out and given as its default are the same."""
    asked: dict[str, object] = to_builtins(replace(body, name=None, model=body.model or DEMO_MODEL_NAME))
    return asked


def _shown(value: object, field: str) -> str:
    """Return a field's value as the command line takes it: ``ttft=0.5,e2e=8`` for an SLO, ``none`` for nothing."""
    if value is None:
        text = "none"
    elif field == "slo" and isinstance(value, dict):
        limits = [f"{name.removesuffix('_s')}={limit:g}" for name, limit in value.items() if limit is not None]
        text = ",".join(limits) or "none"
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _VALUE_SHOWN else f"{text[: _VALUE_SHOWN - 3]}..."
