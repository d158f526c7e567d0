"""JSON over HTTP to one of iServe's own processes on this machine: one connection per call, the project's errors.

Knows the wire, not the routes: the daemon's and the controller's clients say what is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from fingerprint.codec import from_json
from fingerprint.errors import (
    BadInputError,
    BusyError,
    ConflictError,
    IserveError,
    NoAnswerError,
    NotFoundError,
    UnavailableError,
    error_class,
)

__all__ = ["JsonHttp"]

T = TypeVar("T")
Headers = Mapping[str, str] | None

_MAX_ANSWER_BYTES = 64 << 20


class JsonHttp:
    """Client of the JSON API of ``server`` at ``url``. Safe to share between threads, and nothing to close.

    Args:
        server: for error messages, such as ``the daemon``.
        hint: what a person can do when it is away.

    Raises (every method):
        NoAnswerError: it is away, does not answer in time or answers nonsense.
        IserveError: what it answered with, of the class that it named.
    """

    def __init__(self, url: str, token: str, *, server: str, hint: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise BadInputError(f"the URL of {server} is http://HOST:PORT, got {url!r}")
        self.url, self._server, self._hint = url, server, hint
        self._token = token

    def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        timeout_s: float,
        body: bytes = b"",
        headers: Headers = None,
    ) -> T:
        """Return the answer as a ``kind``."""
        answer = self.request(method, path, body=body, headers=headers, timeout_s=timeout_s)
        try:
            return from_json(answer, kind, what=f"the answer of {self._server} to {method} {path}")
        except BadInputError as error:  # the fault is the answerer's, not the request's
            raise NoAnswerError(str(error)) from error

    def request(
        self, method: str, path: str, *, timeout_s: float, body: bytes = b"", headers: Headers = None
    ) -> bytes:
        """Return the answer as received, up to 64 MiB."""
        own = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            status, answer = exchange(
                self.url,
                method,
                path,
                body=body or None,
                headers=own | dict(headers or {}),
                timeout_s=timeout_s,
                max_bytes=_MAX_ANSWER_BYTES,
            )
        except EXCHANGE_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise NoAnswerError(
                f"{self._server} at {self.url} does not answer {method} {path}: {reason}{self._hint}"
            ) from error
        if not 200 <= status < 300:
            raise self._error(status, answer)
        return answer

    def _error(self, status: int, answer: bytes) -> IserveError:
        """Return the project's error that the answer names, or the one nearest to the HTTP status."""
        nearest = {400: BadInputError, 404: NotFoundError, 409: ConflictError}.get(status, UnavailableError)
        try:
            body = from_json(answer, dict[str, Any], what="the error")
        except BadInputError:
            return nearest(f"{self._server} answered {status}: {answer[:200]!r}")
        kind = BusyError if body.get("is_busy") is True else error_class(body.get("error"), nearest)
        if kind is NoAnswerError:  # of a process behind the one that was asked, which has answered
            kind = UnavailableError
        return kind(str(body.get("message", f"{self._server} answered {status}")))
