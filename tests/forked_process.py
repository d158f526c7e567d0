"""Processes of one program, forked from one that has imported it once: importing takes most of what they take.

A process from here is as one that was started (:mod:`tests.fork_server`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tests.fork_server import Order, send
from tests.waiting import PATIENCE_S, wait_until

__all__ = ["Forked", "Forking"]

ROOT = Path(__file__).parents[1]
_ROOM = "-" * 32_768  # for the command line and the environment that a fork shows in /proc


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
    """Processes that run ``main`` of ``module``, forked from one that starts with the first and ends with us.

    It has also imported the modules ``used``, which the program imports only when it needs them.
    """

    def __init__(self, module: str, *used: str) -> None:
        self._module, self._used = module, used

    @cached_property
    def _folder(self) -> Path:
        """Return the folder of the server's socket and of exit statuses, once the server is starting."""
        self._held = tempfile.TemporaryDirectory(prefix="forked-")
        folder = Path(self._held.name)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(64)
            fileno = listener.fileno()
            code = "from tests.fork_server import serve; serve()"
            self._server = subprocess.Popen(
                [sys.executable, "-c", code, self._module, str(folder), str(fileno), *self._used, _ROOM],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "ROOM": _ROOM},
                stdin=subprocess.PIPE,
                pass_fds=(fileno,),
            )
        return folder

    @property
    def socket(self) -> str:
        """Socket of the server, which is started with the first use."""
        return str(self._folder / "socket")

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Return the process, which has ``arguments`` as its ``sys.argv`` and writes to ``log``."""
        return self._start(arguments, environment, os.devnull, str(log), str(log))

    def start_detached(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Return the id of a process in a session of its own, whose exit status is not kept."""
        return self._start(arguments, environment, os.devnull, str(log), str(log), detached=True).pid

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a process to its end; return its exit status and what it wrote."""
        with tempfile.TemporaryDirectory(prefix="forked-run-") as folder:
            files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
            files[0].write_text(stdin)
            forked = self._start(arguments, environment, *map(str, files))
            try:
                code = forked.wait()
            finally:
                forked.kill()
            out, err = (file.read_text() for file in files[1:])
        return subprocess.CompletedProcess(list(arguments), code, out, err)

    def _start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdin: str,
        stdout: str,
        stderr: str,
        *,
        detached: bool = False,
    ) -> Forked:
        command = [sys.executable, *arguments]
        # For tests/tiers.py, which looks at what a test starts.
        sys.audit("subprocess.Popen", sys.executable, command, None, None)
        order = Order(command, list(arguments), dict(environment), os.getcwd(), stdin, stdout, stderr, detached)
        return Forked(send(order, self.socket), self._folder)
