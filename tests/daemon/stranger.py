"""A program on a worker's port that is not the worker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stranger:
    """Answers 200 to everything; it notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []  # path, Authorization

    @contextlib.contextmanager
    def listening(self, port: int) -> Iterator[None]:
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()
