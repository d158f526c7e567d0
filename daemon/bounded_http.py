"""aiohttp's server with bounds on what clients may hold that connect and never ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from daemon.connections import ConnectionLimit

__all__ = ["BoundedRunner"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BoundedRunner(web.AppRunner):
    """Runner of an application on whose connections no request may be awaited longer than ``wait_s``.

    So long for its head, and again for its body. Beyond ``most`` connections the one that has waited longest gives
    way to the newcomer.
    """

    def __init__(self, app: web.Application, *, most: int, wait_s: float, **options: Any) -> None:
        self._limit: ConnectionLimit[Any] = ConnectionLimit(most, _abort, wait_s=wait_s)
        app.middlewares.insert(0, self._watch())
        super().__init__(app, **options)

    async def setup(self) -> None:
        await super().setup()
        server, limit = self.server, self._limit
        assert server is not None
        opened, closed = server.connection_made, server.connection_lost

        def connection_made(handler: RequestHandler, transport: Any) -> None:
            opened(handler, transport)
            limit.opened(handler)

        def connection_lost(handler: RequestHandler, error: BaseException | None = None) -> None:
            limit.closed(handler)
            closed(handler, error)

        server.connection_made = connection_made  # type: ignore[method-assign]
        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def _watch(self) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
        limit = self._limit

        @web.middleware
        async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection, is_over = request.protocol, False

            def body_has_come() -> None:
                if not is_over:  # a body that arrives after its answer is no work
                    limit.works(connection)

            limit.waits(connection)
            request.content.on_eof(body_has_come)  # at once where there is no body
            try:
                return await handler(request)
            finally:
                is_over = True
                limit.waits(connection)

        return watch


def _abort(handler: RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()  # type: ignore[attr-defined]
