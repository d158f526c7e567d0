"""The profiling routes of ``daemon.profile_client`` over HTTP, for an engine in an interpreter of its own.

It needs the standard library alone, so messages are plain JSON here; the client reads them strictly. The main
thread runs the engine; HTTP threads hand it one piece of work at a time, and ``/health`` is answered meanwhile.
"""

from __future__ import annotations

import argparse
import hmac
import io
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from iserve_profiling.base import ProfilingEngine, WorkError

_MAX_BODY_BYTES = 1 << 20
_REQUEST_TIMEOUT_S = 10.0  # for head and body of a request, and for its answer to be taken
_MAX_CONNECTIONS = 64
_STATUS = {"BadInputError": 400, "ConfigError": 400, "ConflictError": 409, "UnavailableError": 503}


@dataclass
class _Work:
    """Request for the main thread, and the place of its answer."""

    call: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: WorkError | None = None


class _Worker:
    """Gives work to the main thread, one piece at a time."""

    def __init__(self, hosted: ProfilingEngine, machine: Any) -> None:
        self.hosted = hosted
        self.machine = machine
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # a signal handler may put into it
        self._busy = threading.Lock()

    def ask(self, call: Callable[[], Any]) -> Any:
        if not self._busy.acquire(blocking=False):
            raise WorkError("ConflictError", "another profiling request is under way; send one at a time")
        try:
            work = _Work(call)
            self._work.put(work)
            work.done.wait()
        finally:
            self._busy.release()
        if work.error is not None:
            raise work.error
        return work.answer

    def stop(self) -> None:
        self._work.put(None)

    def run(self) -> None:
        """Until :meth:`stop`; what is loaded is given back."""
        try:
            while (work := self._work.get()) is not None:
                try:
                    work.answer = work.call()
                except WorkError as error:
                    work.error = error
                except Exception as error:  # noqa: BLE001  # engines raise many kinds; each is reported to the caller
                    work.error = WorkError("EngineError", f"{type(error).__name__}: {error}")
                finally:
                    work.done.set()
        finally:
            self.hosted.unload()


class _InTime(io.RawIOBase):
    """Bytes of a connection, for ``_REQUEST_TIMEOUT_S`` in all; a socket's own timeout begins anew with each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._ends_s = connection, time.monotonic() + _REQUEST_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request is not whole in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


def _handler(worker: _Worker, token: str | None) -> type[BaseHTTPRequestHandler]:
    routes: dict[tuple[str, str], Callable[[Any], Callable[[], Any]]] = {
        ("POST", "/profile/load"): lambda body: lambda: worker.hosted.load(body),
        ("POST", "/profile/bursts"): lambda body: lambda: worker.hosted.bursts(body),
        ("POST", "/profile/run"): lambda body: lambda: worker.hosted.run(body),
        ("POST", "/profile/variants"): lambda body: lambda: worker.hosted.load_variants(body),
        ("GET", "/profile/state"): lambda body: worker.hosted.state,
        ("GET", "/profile/memory"): lambda body: lambda: worker.hosted.memory(),
        ("GET", "/profile/machine"): lambda body: lambda: worker.machine,
    }

    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            self.rfile = io.BufferedReader(_InTime(self.request))

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(200, {})
            else:
                self._route("GET")

        def do_POST(self) -> None:
            self._route("POST")

        def _route(self, method: str) -> None:
            given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                return self._answer(401, {"error": "BadInputError", "message": "the worker's token is wanted"})
            try:
                route = routes.get((method, self.path))
                if route is None:
                    return self._answer(404, {"error": "NotFoundError", "message": f"no route {self.path}"})
                if self.path == "/profile/state":  # of the work under way
                    answer = worker.hosted.state()
                else:
                    answer = worker.ask(route(self._body(method)))
            except WorkError as error:
                return self._answer(_STATUS.get(error.name, 500), {"error": error.name, "message": str(error)})
            return self._answer(200, answer)

        def _body(self, method: str) -> Any:
            if method == "GET":
                return None
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
                raise WorkError("BadInputError", f"a body needs its length, at most {_MAX_BODY_BYTES} bytes")
            try:
                return json.loads(self.rfile.read(int(length)))
            except (ValueError, RecursionError) as error:
                raise WorkError("BadInputError", f"the body is not JSON: {error}") from error

        def _answer(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.request.settimeout(_REQUEST_TIMEOUT_S)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write no line per request."""

    return Handler


class _Server(ThreadingHTTPServer):
    """Server of ``_MAX_CONNECTIONS`` at most: each connection has a thread and one request."""

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def read_spec(description: str | None) -> tuple[dict[str, Any], Any, bool]:
    """Return the WorkerSpec that the command line names, its profile's machine, and whether steps are timed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--spec", type=Path, required=True, help="a WorkerSpec as JSON, beside machine.json")
    parser.add_argument("--no-step-timer", action="store_true", help="time bursts by the wall clock alone")
    options = parser.parse_args()
    machine = json.loads((options.spec.parent / "machine.json").read_text())
    return json.loads(options.spec.read_text()), machine, not options.no_step_timer


def _token() -> str | None:
    """Read the token that clients have to send from the working directory, which is the worker's folder."""
    try:
        return Path("token").read_text().strip() or None
    except FileNotFoundError:
        return None


def serve(hosted: ProfilingEngine, machine: Any) -> None:
    """Answer until SIGTERM, then end the process. The engine's package is imported: ready means ready."""
    worker = _Worker(hosted, machine)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    server = _Server((hosted.spec["host"], hosted.spec["port"]), _handler(worker, _token()))
    threading.Thread(target=server.serve_forever, daemon=True, name="http").start()
    worker.run()
    server.shutdown()
    sys.stdout.flush()
    os._exit(0)  # the engine's own threads may linger
