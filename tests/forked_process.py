"""Processes of one program, forked from one that has imported it once: importing takes most of what they take.

A process from here is as one that was started: environment, folder, arguments, output and exit status are its own.
Only /proc shows the command line and environment of what it was forked from.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waiting import PATIENCE_S, wait_until

__all__ = ["Forked", "Forking"]

ROOT = Path(__file__).parents[1]

# Arguments: module, folder of exit statuses. A line of input is a process to fork; each that ends leaves a file.
_FORKING = """
import gc, importlib, json, logging, os, selectors, signal, sys, traceback

module, ended = importlib.import_module(sys.argv[1]), sys.argv[2]
gc.collect(), gc.freeze()
wake, waker = os.pipe()
for end in (wake, waker):
    os.set_blocking(end, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(waker, warn_on_full_buffer=False)


def become(order):
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, standard)
    os.closerange(3, 64)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    sys.argv = order["arguments"]
    try:
        return module.main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr)  # as Python does with words
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


looking = selectors.DefaultSelector()
looking.register(0, selectors.EVENT_READ)
looking.register(wake, selectors.EVENT_READ)
rest = b""
while True:
    ready = {key.fd for key, _ in looking.select()}
    if wake in ready:
        os.read(wake, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            with open(f"{ended}/{pid}.new", "w") as file:
                file.write(str(os.waitstatus_to_exitcode(status)))
            os.rename(f"{ended}/{pid}.new", f"{ended}/{pid}")
    if 0 in ready:
        read = os.read(0, 1 << 20)
        if not read:
            os._exit(0)
        *lines, rest = (rest + read).split(b"\\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                code = become(json.loads(line))
                logging.shutdown()
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code or 0)
            os.write(1, b"%d\\n" % pid)
"""


class Forked:
    """Forked process, with what tests use of ``subprocess.Popen``."""

    def __init__(self, pid: int, ended: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended / str(pid)

    def poll(self) -> int | None:
        if self.returncode is None and self._ended.exists():
            self.returncode = int(self._ended.read_text())
            self._ended.unlink()  # the kernel may give the number again
        return self.returncode

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        wait_until(lambda: self.poll() is not None, f"process {self.pid} ends", timeout_s)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forking:
    """Processes that run ``main`` of ``module``, forked from one that starts with the first and ends with us."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._from: subprocess.Popen[bytes] | None = None
        self._ended: tempfile.TemporaryDirectory[str]

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Return the process, which has ``arguments`` as its ``sys.argv`` and writes to ``log``."""
        # For tests/tiers.py, which looks at what a test starts.
        sys.audit("subprocess.Popen", sys.executable, [sys.executable, *arguments], None, None)
        if self._from is None:
            self._ended = tempfile.TemporaryDirectory(prefix="forked-")
            self._from = subprocess.Popen(
                [sys.executable, "-c", _FORKING, self._module, self._ended.name],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._from.stdin is not None
        assert self._from.stdout is not None
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "log": str(log),
        }
        self._from.stdin.write(json.dumps(order).encode() + b"\n")
        self._from.stdin.flush()
        return Forked(int(self._from.stdout.readline()), Path(self._ended.name))
