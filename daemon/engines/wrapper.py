"""Wrapper between a shim and an engine that is not ours: ``python -m daemon.engines.wrapper --port P -- COMMAND``.

Engines like vLLM are several processes and share a port with any process that asks for it (SO_REUSEPORT). So the
wrapper makes sure first that the port is free, hands every signal on, ends with the engine's own exit status, and
leaves none of its processes behind: not when the engine ends, not when the shim is killed (the lease's end is
the shim's to see), and not when it is killed itself, for then the kernel kills the engine and the shim, a
subreaper, inherits the rest. Standard library only, one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path

from daemon.exit_codes import PORT_IN_USE
from daemon.process_tree import become_subreaper, end_all_children, set_parent_death_signal, signal_group
from daemon.worker_token import read_token

__all__ = ["end_like", "main", "port_is_free"]

_COULD_NOT_START = 127
_HANDED_ON = (signal.SIGTERM, signal.SIGINT)
_LISTENING = "0A"


def port_is_free(host: str, port: int) -> bool:
    """Return whether no process has the port, connections that are still being closed aside.

    A strict bind fails for those too; a lenient one (SO_REUSEADDR) does not see a socket that was bound leniently
    itself and does not listen yet, such as a loading vLLM's. So a port that only the lenient bind gets is free
    if closing connections explain it.
    """
    if _can_bind(host, port, lenient=False):
        return True
    return _can_bind(host, port, lenient=True) and port in _ports_of_closing_connections()


def _can_bind(host: str, port: int, *, lenient: bool) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if lenient:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _ports_of_closing_connections() -> set[int]:
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in list(lines)[1:]:
                _, local, _, state = line.split()[:4]
                if state != _LISTENING:
                    ports.add(int(local.rpartition(":")[2], 16))
    return ports


class _Wrapper:
    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._argv, self._env = argv, env
        self._shim_pid = os.getppid()
        self._to_hand_on: list[int] = []

    def run(self) -> int:
        """Run until nothing of the engine is left; return its exit status, negative for a signal that ended it."""
        wakeup, wakeup_write = os.pipe()
        for end in (wakeup, wakeup_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for signum in _HANDED_ON:
            signal.signal(signum, lambda got, _frame: self._to_hand_on.append(got))
        become_subreaper()
        shim = os.pidfd_open(self._shim_pid)
        set_parent_death_signal(0)  # the shim asked for SIGKILL, which would leave no time to clear up
        if os.getppid() != self._shim_pid:
            return _COULD_NOT_START
        try:
            engine = self._start()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"cannot start {self._argv[0]}: {error}", file=sys.stderr, flush=True)
            return _COULD_NOT_START
        self._watch(engine, shim, wakeup)
        signal_group(engine.pid, signal.SIGKILL)  # before reaping: until then its group id cannot be reused
        status = engine.wait()
        end_all_children()
        return status

    def _start(self) -> subprocess.Popen[bytes]:
        wrapper_pid = os.getpid()

        def prepare() -> None:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != wrapper_pid:
                os._exit(_COULD_NOT_START)

        return subprocess.Popen(
            self._argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=prepare,  # safe: this process has one thread
        )

    def _watch(self, engine: subprocess.Popen[bytes], shim: int, wakeup: int) -> None:
        """Return when the engine's first process has ended (not yet reaped) or the shim has."""
        exited = os.pidfd_open(engine.pid)
        with selectors.DefaultSelector() as selector:
            for watched in (exited, shim, wakeup):
                selector.register(watched, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if wakeup in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup, 512)
                while self._to_hand_on:
                    signal_group(engine.pid, self._to_hand_on.pop(0))
                if exited in ready or shim in ready:
                    return


def end_like(status: int) -> int:
    """End as the engine did: by the same signal, with no core file of our own."""
    if status >= 0:
        return status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 128 - status


def main(argv: list[str]) -> int:
    """Run the wrapper; return the engine's exit status, 98: the port is in use, 127: it cannot be started."""
    parser = argparse.ArgumentParser(prog="python -m daemon.engines.wrapper")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--python-path", default="", help="the engine's PYTHONPATH; none by default")
    parser.add_argument("--token-variable", help="in which the engine gets the token of its working directory")
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args(argv)
    if not port_is_free(arguments.host, arguments.port):
        print(f"port {arguments.port} of {arguments.host} is in use", file=sys.stderr, flush=True)
        return PORT_IN_USE
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if arguments.python_path:
        env["PYTHONPATH"] = arguments.python_path
    if arguments.token_variable and (token := read_token(Path.cwd())):
        env[arguments.token_variable] = token
    return end_like(_Wrapper(arguments.command, env).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
