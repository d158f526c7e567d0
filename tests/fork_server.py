"""Server of forks of one program: a process that has imported it once, and forks for each order it gets.

An order is a line of JSON on a connection to the listening socket that the server was given; the answer is the
process id of the fork. Where its starter waits for a fork, its exit status is left in a file. The server ends when
its standard input does.

A fork is as a started process: environment, folder, arguments, output and, in /proc, its command line and
environment are its own. What it starts detached with ``daemon.process.spawn_detached`` is forked as well where the
environment names a server of that program (``PROGRAMS``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

__all__ = ["HELD_LOADS", "HOLD_LOADS", "PROGRAMS", "Order", "become", "import_trimmed", "send", "serve"]

HOLD_LOADS, HELD_LOADS = "hold-loads", "held-loads"  # files in a home, for ``tests.imported_worker``

PROGRAMS = "FORKED_PROGRAMS"  # variable with a JSON object: socket by the module that `python -m` would run
# Modules that start programs of iServe.
_SPAWNERS = ("daemon.worker_process", "iserve.client", "iserve.controller.child_processes")


@dataclass(frozen=True)
class Order:
    """Process to fork.

    ``command`` is what /proc shows; ``stdin``, ``stdout`` and ``stderr`` are files.
    """

    command: Sequence[str]
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    stdin: str
    stdout: str
    stderr: str
    detached: bool = False


def send(order: Order, server: str) -> int:
    """Return the process id of the fork that the server at this socket makes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        connection.sendall(json.dumps(asdict(order)).encode() + b"\n")
        with connection.makefile() as answer:
            return int(answer.readline())


def serve() -> None:
    """Import the program, then fork for each order.

    ``sys.argv``: module of the program, folder for exit statuses, file descriptor of the listening socket, modules
    that the program imports later, and room for what a fork shows in /proc.
    """
    module, ended = importlib.import_module(sys.argv[1]), Path(sys.argv[2])
    listener = socket.socket(fileno=int(sys.argv[3]))
    for name in sys.argv[4:-1]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    looking = selectors.DefaultSelector()
    for file in (0, wake, listener.fileno()):
        looking.register(file, selectors.EVENT_READ)
    awaited = set[int]()
    while True:
        ready = {key.fd for key, _ in looking.select()}
        if wake in ready:
            os.read(wake, 4096)
            _keep_statuses(ended, awaited)
        if 0 in ready:
            os._exit(0)
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            with connection, connection.makefile() as lines, contextlib.suppress(OSError):
                if line := lines.readline():
                    order = Order(**json.loads(line))
                    pid = os.fork() or become(order, partial(_answer_and_run, connection, module.main))
                    if not order.detached:
                        awaited.add(pid)


def import_trimmed(names: Sequence[str]) -> None:
    """Import modules as the embedded engine does: without what it never uses of torch and transformers."""
    from daemon.torch_engine.trimmed_imports import trimmed_imports

    with trimmed_imports():
        for name in names:
            importlib.import_module(name)


def _keep_statuses(ended: Path, awaited: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = child
            if pid in awaited:
                awaited.remove(pid)
                (ended / f"{pid}.new").write_text(str(os.waitstatus_to_exitcode(status)))
                (ended / f"{pid}.new").rename(ended / str(pid))


def _answer_and_run(connection: socket.socket, main: Callable[[], int | None]) -> int | None:
    """Send the id of this process, close what was the server's, and run ``main``."""
    connection.sendall(b"%d\n" % os.getpid())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the listening socket has the number that its starter gave it
    return main()


def become(order: Order, main: Callable[[], int | None]) -> NoReturn:
    """Be the ordered process, and end with what ``main`` returns."""
    code = 1
    try:
        _take_on(order)
        code = main() or 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)  # as Python does with words
    except BaseException:  # noqa: BLE001  # the interpreter's last word
        traceback.print_exc()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _take_on(order: Order) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order.detached:
        os.setsid()
    appended = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = (
        os.open(order.stdin, os.O_RDONLY),
        os.open(order.stdout, appended, 0o600),
        os.open(order.stderr, appended, 0o600),
    )
    for standard, file in enumerate(files):
        os.dup2(file, standard)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    _show(order)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    sys.argv = list(order.arguments)
    if programs := json.loads(os.environ.get(PROGRAMS, "{}")):
        _fork_programs(programs)


def _show(order: Order) -> None:
    """Write the command line and the environment where the kernel reads them for /proc.

    The server was started with enough of both. Nothing else points there: what is in ``os.environ`` was copied.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    bounds = [int(field) for field in fields[45:49]]
    environment = [f"{name}={value}" for name, value in order.environment.items()]
    for start, end, words in zip(bounds[::2], bounds[1::2], (order.command, environment), strict=True):
        shown = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(shown) >= end - start:
            raise ValueError(f"no room to show {len(shown)} bytes in /proc")
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, shown, len(shown))


def _fork_programs(programs: Mapping[str, str]) -> None:
    """Let what starts a program of iServe in this process have it forked by its server."""
    from daemon.process import spawn_detached

    def spawn(argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> int:
        server = programs.get(argv[2]) if tuple(argv[:2]) == (sys.executable, "-m") else None
        try:
            os.close(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        except OSError:
            server = None  # which says what is wrong
        if server is None:
            return spawn_detached(argv, log_path, env)
        environment, log = dict(os.environ if env is None else env), str(log_path.absolute())
        order = Order(argv, argv[2:], environment, os.getcwd(), os.devnull, log, log, detached=True)
        return send(order, server)

    for name in _SPAWNERS:
        if name in sys.modules:
            vars(sys.modules[name])["spawn_detached"] = spawn
