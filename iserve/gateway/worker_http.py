"""Requests to a worker: its address, its token, and the failures after which another worker is tried."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from daemon.worker_token import authorization
from iserve.gateway.errors import ApiError
from iserve.http_stream import Origin

__all__ = ["CONNECT_S", "NotBegunError", "origin_of", "worker_headers", "worker_lost"]

CONNECT_S = 2.0


class NotBegunError(Exception):
    """The worker took the request and went away, or refused for now, before any of its answer was passed on."""

    def __init__(self, reason: str, answer: ApiError) -> None:
        super().__init__(reason)
        self.reason, self.answer = reason, answer


def worker_lost(name: str) -> ApiError:
    return ApiError(
        503, f"the worker of {name!r} went away before it answered; try again", "worker_lost", retry_after_s=1
    )


@lru_cache(maxsize=1024)
def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Origin(parts.hostname, parts.port, parts.netloc)


@lru_cache(maxsize=1024)
def worker_headers(token: str | None) -> bytes:
    """Return headers of every request to a worker that has ``token``."""
    headers = {"User-Agent": "iserve-gateway"} | authorization(token)
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
