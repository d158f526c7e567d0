"""The OpenAPI document of the REST API: descriptions from docstrings, error answers with examples, tags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from iserve.api_documents import Problem
from iserve.api_types import DeployBody
from iserve.attribute_docs import attribute_docstrings
from iserve.rest_bodies import Body

__all__ = ["BODY", "describe", "problems"]

_SCHEMAS = "#/components/schemas/"
BODY = (411, 413, 415)  # statuses of every operation that takes a body

_MEANINGS = {
    400: (
        "The request is wrong as written; change it.",
        "BadInputError",
        "body.batch: Input should be an integer",
    ),
    401: (
        "The `Authorization` header has no valid API key of scope `admin`.",
        "Unauthorized",
        "give `Authorization: Bearer KEY` with an API key of scope admin",
    ),
    404: (
        "A model, variant, deployment, job or key that the request names is not there.",
        "NotFoundError",
        "no deployment is named 'chat'",
    ),
    409: (
        "The request conflicts with the present state, or needs a measurement that was not made.",
        "ConflictError",
        "the deployment 'chat' is launching; update it when it is ready (`iserve ps`)",
    ),
    411: ("A body needs a `Content-Length`.", "BadInputError", "a body needs a Content-Length"),
    413: ("The body is too large.", "BadInputError", "the body is over 1048576 bytes"),
    415: (
        "The body is not declared as `application/json`.",
        "BadInputError",
        "the body is of type 'text/plain'; send it as 'Content-Type: application/json'",
    ),
    422: (
        "No configuration meets the request on the hardware there is; relax a limit or add GPUs.",
        "InfeasibleError",
        "no engine that could serve a deployment is installed here",
    ),
    503: (
        "A part of iServe is away or busy; try again after `Retry-After` seconds.",
        "UnavailableError",
        "this node's daemon is away; it is being started again",
    ),
}

_TAGS = {
    "models": "Names of checkpoint folders.",
    "variants": "LoRA adapters that are served next to their base model.",
    "quality": "Results of `iserve quality`, by what was measured.",
    "profiles": "Measurements of fingerprints, on which predictions rest.",
    "plans": "Choice of a configuration; nothing is started.",
    "deployments": "Models that are served, and their life cycle.",
    "verifications": "Checks of running configurations against their predictions.",
    "nodes": "Machines and their devices.",
    "engines": "Inference engines that are installed.",
    "serving": "Deployments as placement policies see them.",
    "events": "Events of all deployments, in order.",
    "keys": "API keys of the REST API and the OpenAI API.",
    "health": "Health and metrics of the controller.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return error answers in FastAPI's form, each with an example.

    Their body is named, not given as FastAPI's ``model``: from that it would make a validator for each status of
    each operation, which no answer needs and which is a quarter of what the application takes to make.
    """
    answers: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        description, error, message = _MEANINGS[status]
        json = {"example": {"error": error, "message": message}, "schema": {"$ref": _SCHEMAS + Problem.__name__}}
        answers[status] = {"description": description, "content": {"application/json": json}}
    return answers


def describe(app: FastAPI, endpoints: Iterable[object]) -> None:
    """Have the OpenAPI document of ``app`` describe all tags, operations and fields.

    Args:
        endpoints: routes whose bodies and answers are described by their attribute docstrings.
    """
    undescribed = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = undescribed()
            schemas = schema["components"]["schemas"] | {Problem.__name__: TypeAdapter(Problem).json_schema()}
            never_sent = ("HTTPValidationError", "ValidationError")
            schemas = {name: schemas[name] for name in sorted(schemas) if name not in never_sent}
            schema["components"]["schemas"] = schemas
            schema["tags"] = [{"name": name, "description": text} for name, text in _TAGS.items()]
            _describe_operations(schema["paths"])
            _describe_fields(schemas, endpoints)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_operations(paths: dict[str, Any]) -> None:
    """The summary is the first line of the docstring; the tag is the path's first word behind the version."""
    for path, operations in paths.items():
        tag = path.split("/")[3] if path.startswith("/api/v1/") else "health"
        for operation in operations.values():
            operation["tags"] = [tag]
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"][
                    "422"
                ]  # FastAPI's own answer to a bad body, in place of which 400 is sent
            operation["description"] = _plain(operation["description"])
            operation["summary"] = operation["description"].splitlines()[0].rstrip(".")


def _describe_fields(schemas: dict[str, Any], endpoints: Iterable[object]) -> None:
    for found in _types_of(endpoints):
        schema = schemas.get(found.__name__, {})
        texts = (attribute_docstrings(DeployBody) if issubclass(found, Body) else {}) | attribute_docstrings(found)
        for name, field in schema.get("properties", {}).items():
            if name in texts:
                field.setdefault("description", _plain(texts[name]))
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = _plain(schema["description"].partition("\n\nRaises:")[0])


def _plain(text: str) -> str:
    """Return a Python docstring as Markdown that speaks of JSON."""
    return re.sub(r"\bNone\b", "null", text.replace("``", "`"))


def _types_of(endpoints: Iterable[object]) -> Iterator[type]:
    """Yield every dataclass and model that the bodies and answers of ``endpoints`` consist of."""
    found: set[type] = set()

    def walk(hint: Any) -> Iterator[type]:
        for part in get_args(hint):
            yield from walk(part)
        if isinstance(hint, type) and hint not in found and (is_dataclass(hint) or issubclass(hint, BaseModel)):
            found.add(hint)
            yield hint
            for field in get_type_hints(hint, include_extras=True).values():
                yield from walk(field)

    for route in endpoints:
        if isinstance(route, APIRoute):
            for hint in get_type_hints(route.endpoint, include_extras=True).values():
                yield from walk(hint)
    yield from walk(Problem)
