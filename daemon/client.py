"""Talking to a node's daemon: one method per route, typed answers, the project's own errors. Synchronous."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import fingerprint.errors
from daemon.engines.base import WorkerSpec
from daemon.process import read_record
from daemon.status import NodeStatus, WorkerStatus
from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, ConflictError, IserveError, NotFoundError, UnavailableError

__all__ = ["DaemonClient"]

T = TypeVar("T")

_MAX_ANSWER_BYTES = 64 << 20


class DaemonClient:
    """A daemon at ``url``. One connection per call: safe to share between threads, and nothing to close.

    Every method raises UnavailableError when the daemon is away, does not answer in time or answers nonsense.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 10.0, stop_timeout_s: float = 90.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise BadInputError(f"a daemon's URL is http://HOST:PORT, got {url!r}")
        self.url = url
        self._host, self._port = parts.hostname, parts.port
        self._token = token
        self._timeout_s, self._stop_timeout_s = timeout_s, stop_timeout_s

    @classmethod
    def from_record(cls, path: Path) -> DaemonClient:
        """The daemon of ``run/daemon.json``. Raises UnavailableError: there is no such record."""
        record = read_record(path)
        if record is None:
            raise UnavailableError(f"no daemon has left its record at {path}; start one")
        return cls(record.url, record.token)

    def node(self) -> NodeStatus:
        """Devices and workers now."""
        return self._ask("GET", "/v1/node", NodeStatus)

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Every worker but the stopped ones."""
        return self._ask("GET", "/v1/workers", tuple[WorkerStatus, ...])

    def launch(self, spec: WorkerSpec) -> WorkerStatus:
        """Start a worker; returns while it is ``starting``.

        Raises:
            BadInputError, NotFoundError, ConflictError, InfeasibleError, EngineError: as ``Supervisor.launch``.
        """
        return self._ask("POST", "/v1/workers", WorkerStatus, body=to_json(spec), timeout_s=3 * self._timeout_s)

    def worker(self, worker_id: str) -> WorkerStatus:
        """Raises NotFoundError."""
        return self._ask("GET", f"/v1/workers/{quote(worker_id, safe='')}", WorkerStatus)

    def stop(self, worker_id: str) -> WorkerStatus:
        """Returns when its processes are gone and its memory is free; idempotent. Raises NotFoundError."""
        path = f"/v1/workers/{quote(worker_id, safe='')}"
        return self._ask("DELETE", path, WorkerStatus, timeout_s=self._stop_timeout_s)

    def log(self, worker_id: str, lines: int = 200) -> str:
        """The end of the worker's output. Raises NotFoundError."""
        path = f"/v1/workers/{quote(worker_id, safe='')}/log?lines={lines}"
        return self._request("GET", path, b"", self._timeout_s).decode("utf-8", errors="replace")

    def is_healthy(self) -> bool:
        """Whether a daemon answers there at all."""
        try:
            self._request("GET", "/healthz", b"", self._timeout_s)
        except IserveError:
            return False
        return True

    def _ask(
        self, method: str, path: str, kind: type[T], *, body: bytes = b"", timeout_s: float | None = None
    ) -> T:
        answer = self._request(method, path, body, timeout_s or self._timeout_s)
        try:
            return from_json(answer, kind, what=f"the daemon's answer to {method} {path}")
        except BadInputError as error:  # the fault is the daemon's, not the request's
            raise UnavailableError(str(error)) from error

    def _request(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, body=body or None, headers=headers)
            response = connection.getresponse()
            answer = response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"the daemon at {self.url} does not answer {method} {path}: {error!r}"
            ) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise _error(response.status, answer)
        return answer


def _error(status: int, answer: bytes) -> IserveError:
    """The project's error that the daemon named, or the one nearest to the HTTP status."""
    nearest = {400: BadInputError, 404: NotFoundError, 409: ConflictError}.get(status, UnavailableError)
    try:
        body = from_json(answer, dict[str, Any], what="the daemon's error")
    except BadInputError:
        return nearest(f"the daemon answered {status}: {answer[:200]!r}")
    named = getattr(fingerprint.errors, str(body.get("error")), None)
    kind = named if isinstance(named, type) and issubclass(named, IserveError) else nearest
    return kind(str(body.get("message", f"the daemon answered {status}")))
