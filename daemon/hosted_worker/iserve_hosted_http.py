"""The profiling routes of ``daemon.profile_client`` over HTTP, for an engine in an interpreter of its own.

It needs the standard library alone, so messages are plain JSON here; the client reads them strictly. The main
thread runs the engine; HTTP threads hand it one piece of work at a time, and ``/health`` is answered meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from iserve_hosted import Hosted, WorkError

_MAX_BODY_BYTES = 1 << 20
_BODY_TIMEOUT_S = 10.0
_STATUS = {"BadInputError": 400, "ConfigError": 400, "ConflictError": 409, "UnavailableError": 503}


@dataclass
class _Work:
    """One request for the main thread, and the place of its answer."""

    call: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: WorkError | None = None


class _Worker:
    """Gives work to the main thread, one piece at a time."""

    def __init__(self, hosted: Hosted, machine: Any) -> None:
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
                except Exception as error:  # noqa: BLE001  # engines raise many kinds; the caller is told each
                    work.error = WorkError("EngineError", f"{type(error).__name__}: {error}")
                finally:
                    work.done.set()
        finally:
            self.hosted.unload()


def _handler(worker: _Worker) -> type[BaseHTTPRequestHandler]:
    routes: dict[tuple[str, str], Callable[[Any], Callable[[], Any]]] = {
        ("POST", "/profile/load"): lambda body: lambda: worker.hosted.load(body),
        ("POST", "/profile/bursts"): lambda body: lambda: worker.hosted.bursts(body),
        ("GET", "/profile/memory"): lambda body: lambda: worker.hosted.memory(),
        ("GET", "/profile/machine"): lambda body: lambda: worker.machine,
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = _BODY_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(200, {})
            else:
                self._route("GET")

        def do_POST(self) -> None:
            self._route("POST")

        def _route(self, method: str) -> None:
            try:
                route = routes.get((method, self.path))
                if route is None:
                    return self._answer(404, {"error": "NotFoundError", "message": f"no route {self.path}"})
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
            except ValueError as error:
                raise WorkError("BadInputError", f"the body is not JSON: {error}") from error

        def _answer(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """No line per request."""

    return Handler


def read_spec(description: str | None) -> tuple[dict[str, Any], Any]:
    """What the command line names: a WorkerSpec, and the machine as its profile records it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--spec", type=Path, required=True, help="a WorkerSpec as JSON, beside machine.json")
    options = parser.parse_args()
    return json.loads(options.spec.read_text()), json.loads((options.spec.parent / "machine.json").read_text())


def serve(hosted: Hosted, machine: Any) -> None:
    """Answer until SIGTERM, then end the process. The engine's package is imported: ready means ready."""
    worker = _Worker(hosted, machine)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    server = ThreadingHTTPServer((hosted.spec["host"], hosted.spec["port"]), _handler(worker))
    threading.Thread(target=server.serve_forever, daemon=True, name="http").start()
    worker.run()
    server.shutdown()
    sys.stdout.flush()
    os._exit(0)  # the engine's own threads may linger
