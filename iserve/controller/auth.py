"""Admission of REST requests before their bodies are read: the caller, and the size of the body."""

from __future__ import annotations

import hmac
from collections.abc import Callable, MutableMapping
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fingerprint.errors import UnavailableError
from iserve.controller.folder_access import ANYWHERE, Reach
from iserve.keys import find_key
from iserve.route_table import ApiKeyRecord
from iserve.state.store import Store

__all__ = ["MAX_BODY_BYTES", "Caller", "Door", "problem"]

MAX_BODY_BYTES = 1 << 20

_OPEN_PATHS = frozenset({"/healthz", "/readyz"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _reach(request: Request) -> Reach:
    """Return the reach of the caller, as the door found it."""
    reach: Reach = request.state.reach
    return reach


Caller = Annotated[Reach, Depends(_reach)]


def problem(name: str, message: str, status: int, *, is_busy: bool = False) -> JSONResponse:
    """Return the body of every error: the class of ``fingerprint.errors``, and one line."""
    headers = {"Retry-After": "1"} if status == 503 else None
    body: dict[str, object] = {"error": name, "message": message}
    return JSONResponse(body | {"is_busy": True} if is_busy else body, status, headers=headers)


class Door:
    """ASGI middleware. Everything but the two health checks needs the home's token or an admin API key.

    Args:
        token: of run/controller.json; the command line reads it there.
        reach: which folders API keys may name. The state of a request has its caller's, as ``reach``.
        count: called with method and status of every answer.
    """

    def __init__(
        self, app: ASGIApp, *, store: Store, token: str, reach: Reach, count: Callable[[str, int], None]
    ) -> None:
        self._app, self._store, self._token, self._count = app, store, token.encode(), count
        self._key_reach = reach

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"  # a label's values are bounded

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(method, message["status"])
            await send(message)

        headers = Headers(scope=scope)
        refusal = None
        if scope["path"] not in _OPEN_PATHS:
            state = scope.setdefault("state", {})
            refusal = await run_in_threadpool(self._refusal, headers, state)
        answer: ASGIApp = self._app if refusal is None else refusal
        await answer(scope, receive, counted)

    def _refusal(self, headers: Headers, state: MutableMapping[str, object]) -> JSONResponse | None:
        try:
            state["reach"] = self._reach_of(headers.getlist("authorization"))
            if state["reach"] is None:
                refusal = problem(
                    "Unauthorized",
                    "give `Authorization: Bearer KEY` with an API key of scope admin; `iserve keys create --scope "
                    "admin` on the controller's machine makes one",
                    401,
                )
                refusal.headers["WWW-Authenticate"] = "Bearer"
                return refusal
        except UnavailableError as error:
            return problem(type(error).__name__, str(error), 503)
        # A body of undeclared length is not begun; a declared length is kept to by the HTTP server.
        if "transfer-encoding" in headers:
            return problem("BadInputError", "a body needs a Content-Length", 411)
        if int(headers.get("content-length", "0")) > MAX_BODY_BYTES:
            return problem("BadInputError", f"the body is over {MAX_BODY_BYTES} bytes", 413)
        return None

    def _reach_of(self, authorizations: list[str]) -> Reach | None:
        """Return the folders that a caller with these headers may name; None: a caller without any right."""
        if len(authorizations) != 1:
            return None
        scheme, _, presented = authorizations[0].partition(" ")
        if scheme.lower() != "bearer" or not presented:
            return None
        if hmac.compare_digest(presented.encode(), self._token):
            return ANYWHERE
        records = [
            ApiKeyRecord(key_id=k.key_id, sha256=k.sha256, scope=k.scope)
            for k in self._store.api_keys()
            if not k.revoked and k.scope == "admin"
        ]
        return None if find_key(presented, records) is None else self._key_reach
