"""Asking workers how they are, over their own HTTP face. Believes nothing but well-formed, small answers."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Any

import aiohttp

from daemon.worker_stats import WorkerStats
from daemon.worker_token import authorization
from fingerprint.errors import IserveError

__all__ = ["Health", "Prober"]

_MAX_ANSWER_BYTES = 1 << 20


class Health(Enum):
    OK = "ok"  # serves
    NOT_READY = "not ready"  # answers, but not with 200: loading, draining, failed
    SILENT = "silent"  # does not answer


class Prober:
    """HTTP client of all workers of the node. Use inside ``async with``."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Prober:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(limit=0, use_dns_cache=False),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def health(self, url: str) -> Health:
        """Return what ``GET /health`` says now. The route is open, and no token is sent there.

        A worker that starts does not have its port yet, and another program may.
        """
        answer = await self._ask("GET", f"{url}/health", None)
        if answer is None:
            return Health.SILENT
        return Health.OK if answer[0] == 200 else Health.NOT_READY

    async def stats(
        self, url: str, read: Callable[[bytes], WorkerStats], token: str | None = None
    ) -> WorkerStats | None:
        """Return what ``GET url`` answers, by the engine's ``read``; None for no answer or one that it does not
        take.
        """
        answer = await self._ask("GET", url, token)
        if answer is None or answer[0] != 200:
            return None
        try:
            return read(answer[1])
        except IserveError:
            return None

    async def completes(self, url: str, body: dict[str, object], token: str | None) -> bool:
        """Return whether the worker at ``url`` answers a completion with 200, however long that takes."""
        unlimited = aiohttp.ClientTimeout()
        answer = await self._ask("POST", f"{url}/v1/completions", token, json=body, timeout=unlimited)
        return answer is not None and answer[0] == 200

    async def _ask(self, method: str, url: str, token: str | None, **more: Any) -> tuple[int, bytes] | None:
        """Return status and body, of which no more than ``_MAX_ANSWER_BYTES`` are read; None: no answer."""
        assert self._session is not None
        headers = authorization(token)
        try:
            async with self._session.request(
                method, url, headers=headers, allow_redirects=False, **more
            ) as response:
                body = await response.content.read(_MAX_ANSWER_BYTES)
                while not response.content.at_eof() and len(body) < _MAX_ANSWER_BYTES:
                    body += await response.content.read(_MAX_ANSWER_BYTES - len(body))
                return response.status, body
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
