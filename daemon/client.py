"""Talking to a node's daemon: one method per route, typed answers, the project's own errors. Synchronous."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote, urlencode

from daemon.json_http import JsonHttp
from daemon.status import NodeStatus, WorkerStatus
from daemon.worker_log import LogPart
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import to_json

__all__ = ["DaemonClient"]

T = TypeVar("T")


class DaemonClient:
    """A daemon at ``url``. One connection per call: safe to share between threads, and nothing to close.

    Every method raises UnavailableError when the daemon is away, does not answer in time or answers nonsense.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 10.0, stop_timeout_s: float = 90.0) -> None:
        self._http = JsonHttp(url, token, server="the daemon")
        self.url = url
        self._timeout_s, self._stop_timeout_s = timeout_s, stop_timeout_s

    def node(self) -> NodeStatus:
        """Return the devices and workers now."""
        return self._ask("GET", "/v1/node", NodeStatus)

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return every worker but the stopped ones."""
        return self._ask("GET", "/v1/workers", tuple[WorkerStatus, ...])

    def launch(self, spec: WorkerSpec) -> WorkerStatus:
        """Start a worker; returns while it is ``starting``.

        Raises:
            BadInputError, NotFoundError, ConflictError, InfeasibleError, EngineError: as ``Supervisor.launch``.
        """
        return self._ask("POST", "/v1/workers", WorkerStatus, body=to_json(spec), timeout_s=3 * self._timeout_s)

    def worker(self, worker_id: str) -> WorkerStatus:
        """Return one worker. Raises NotFoundError."""
        return self._ask("GET", f"/v1/workers/{quote(worker_id, safe='')}", WorkerStatus)

    def stop(self, worker_id: str) -> WorkerStatus:
        """Stop a worker; return when its processes are gone and its memory is free; idempotent.

        Raises NotFoundError.
        """
        path = f"/v1/workers/{quote(worker_id, safe='')}"
        return self._ask("DELETE", path, WorkerStatus, timeout_s=self._stop_timeout_s)

    def log(self, worker_id: str, lines: int = 200) -> str:
        """Return the end of the worker's output. Raises NotFoundError."""
        path = f"/v1/workers/{quote(worker_id, safe='')}/log?lines={lines}"
        return self._http.request("GET", path, timeout_s=self._timeout_s).decode("utf-8", errors="replace")

    def log_part(self, worker_id: str, *, lines: int, position: str | None = None) -> LogPart:
        """Return what was written behind ``position``; without one, the last lines. Raises NotFoundError."""
        query = urlencode({"lines": lines} if position is None else {"position": position})
        return self._ask("GET", f"/v1/workers/{quote(worker_id, safe='')}/log/part?{query}", LogPart)

    def _ask(
        self, method: str, path: str, kind: type[T], *, body: bytes = b"", timeout_s: float | None = None
    ) -> T:
        return self._http.ask(method, path, kind, body=body, timeout_s=timeout_s or self._timeout_s)
