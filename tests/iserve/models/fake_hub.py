"""Hub of models on this machine, over real HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


# --- the hub ---


@dataclass
class Hub:
    """A hub that serves folders; ``asked`` holds the paths of all requests."""

    url: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    status: int = 0  # answer everything with this
    page: bytes = b""  # and this
    drips: str = ""  # paths with this in them are answered without end
    closing: threading.Event = field(default_factory=threading.Event)

    def files_got(self) -> list[str]:
        return sorted({path.rpartition("/")[2] for path in self.asked if "/resolve/" in path})


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(10**6))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not self.server.hub.closing.wait(0.05):
                self.wfile.write(b" ")

    def do_GET(self) -> None:
        hub, path = self.server.hub, self.path.partition("?")[0]
        hub.asked.append(path)
        if hub.status:
            return self.answer(hub.status, hub.page)
        if hub.drips and hub.drips in path and self.command == "GET":
            return self.drip()
        for name, folder in hub.models.items():
            if path.startswith(f"/api/models/{name}"):
                return self.api(path, name, folder)
            if path.startswith(f"/{name}/resolve/"):
                file = folder / path.rpartition("/")[2]
                if not file.is_file():
                    return self.answer(404, X_Error_Code="EntryNotFound")
                body = file.read_bytes()
                tag = f'"{hashlib.sha1(body).hexdigest()}"'
                return self.answer(200, body, ETag=tag, X_Repo_Commit=COMMIT)
        return self.answer(404, b"{}", X_Error_Code="RepoNotFound")

    def api(self, path: str, name: str, folder: Path) -> None:
        files = sorted(entry.name for entry in folder.iterdir())
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": "0" * 40}
                for file in files
            ]
            return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

    do_HEAD = do_GET


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""
    hub = Hub()
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield hub
    hub.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()
