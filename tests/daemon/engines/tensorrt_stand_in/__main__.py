"""Start as the engine does: read everything, take the port, load, only then listen."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .engine import Behaviour, Engine
from .flags import parse
from .options import merged
from .refusal import RefusedError
from .server import serve


def main(argv: list[str] | None = None) -> int:
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except RefusedError as error:
        print(error.text, file=sys.stderr, flush=True)
        return error.exit_code


def _run(argv: list[str]) -> int:
    model, flags, from_flags = parse(argv)
    directory = Path(model)
    if flags["--backend"] != "pytorch":
        raise RefusedError("the stand-in has the PyTorch backend only")
    if not (directory / "config.json").exists():
        raise RefusedError(f"OSError: {model} is no checkpoint here, and hubs are out of reach")
    file = flags["--config"]
    options = merged(from_flags, None if file is None else Path(str(file)).read_text())
    behaviour = Behaviour.of(directory)
    listener = _bind(str(flags["--host"]), int(str(flags["--port"])), behaviour)
    engine = Engine(directory, options, behaviour)
    try:
        engine.spawn_ranks()  # no handler yet: a signal now leaves the ranks alone in the world
    except RefusedError:
        engine.end_ranks()
        raise
    server = ThreadingHTTPServer(listener.getsockname()[:2], BaseHTTPRequestHandler, bind_and_activate=False)
    server.socket = listener
    server.daemon_threads = True
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: threading.Thread(target=server.shutdown).start())
    server.server_activate()
    print("INFO:     Application startup complete.", flush=True)
    serve(server, engine)
    while engine.in_flight:  # it drains, without a deadline
        time.sleep(0.01)
    engine.end_ranks()
    return 0


def _bind(host: str, port: int, behaviour: Behaviour) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if behaviour.port_is_stolen:
            raise OSError(98, "Address already in use")
        listener.bind((host, port))
    except OSError as error:
        raise RefusedError(f"RuntimeError: Failed to bind socket to {host}:{port}: {error}") from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
