"""HTTP server on a thread with a loop of its own, from which stand-ins for workers are made."""

from __future__ import annotations

import asyncio
import threading

from aiohttp import web

from tests.waiting import PATIENCE_S

__all__ = ["ThreadedServer"]


class ThreadedServer:
    """Server of the application that :meth:`make_app` returns, on a free port of this machine."""

    url: str = ""

    def make_app(self) -> web.Application:
        raise NotImplementedError

    def serve(self) -> None:
        """Return once requests are answered."""
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE_S)

    def end(self) -> None:
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE_S)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self.make_app(), handler_cancellation=True, shutdown_timeout=0.1)
        self._loop.run_until_complete(self._open(runner))
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _open(self, runner: web.AppRunner) -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
