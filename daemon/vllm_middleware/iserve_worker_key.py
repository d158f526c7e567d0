"""Middleware (ASGI, ``--middleware``) that asks for the worker's token on every route of vLLM's server.

It runs in vLLM's interpreter. vLLM's own key guards the paths under /v1, /v2, /inference and /cohere alone:
``/invocations``, among others, still generates for every client that reaches the port. Standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["WorkerKey"]

_OPEN_PATH = "/health"
_BODY = (
    b'{"error": {"message": "this worker answers its gateway; send the request to the OpenAI API of iServe",'
    b' "type": "invalid_request_error", "param": null, "code": "invalid_api_key"}}'
)
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY))]

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class WorkerKey:
    """Refuse HTTP requests and websockets without the token that ``VLLM_API_KEY`` holds, but for ``/health``.

    Raises:
        KeyError: there is no token; the server then does not start.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_allowed(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            return True
        return bool(scope["type"] == "http" and scope["path"] == _OPEN_PATH)
