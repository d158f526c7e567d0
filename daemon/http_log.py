"""The log of aiohttp's servers: one line for a request that is not valid HTTP, in place of a traceback."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from fingerprint.sanitize import printable

__all__ = ["log_bad_requests_in_one_line"]

_CLIENTS_FAULTS = (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _CLIENTS_FAULTS):
            words = " ".join(str(error).split())
            record.msg, record.args = "%s: not a valid request: %s", (record.getMessage(), printable(words)[:300])
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


_FILTER = _OneLine()


def log_bad_requests_in_one_line() -> None:
    """Set this up for all of this process's servers. Errors of our own keep their traceback."""
    logging.getLogger("aiohttp.server").addFilter(_FILTER)
