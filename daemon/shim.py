"""Parent of one worker: starts it, rotates its log, ends it when its lease runs out, and says how it ended.

``python -m daemon.shim FOLDER``, started detached, outlives the daemon. Standard library only, one thread, and
no knowledge of what the worker does. It is the worker's child subreaper, so that every descendant can be ended,
whatever process group it moved to; and the worker is killed by the kernel should the shim itself be killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from daemon.file_limit import raise_file_limit
from daemon.lease import (
    COMMAND_FILE,
    EXIT_FILE,
    LEASE_FILE,
    LOCK_FILE,
    ExitRecord,
    Lease,
    LeaseFileError,
    ShimOrder,
    read_file,
    write_file,
)
from daemon.process_tree import become_subreaper, end_all_children, set_parent_death_signal, signal_group
from daemon.procfs import boot_id, read_stat

__all__ = ["RotatingLog", "Shim", "main"]

LOG_FILE = "worker.log"

_READ_BYTES = 65536
_READS_PER_LOOK = 16  # then lease and signals get their turn, however much is printed
_LOCK_TRIES_S = 5.0


class RotatingLog:
    """``path``, ``path.1``, ... of at most ``max_bytes`` each. A full disk loses lines, never the worker."""

    def __init__(self, path: Path, *, max_bytes: int, files: int) -> None:
        self._path, self._max_bytes, self._files = path, max_bytes, files
        self._handle: int | None = None
        self._size = 0

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._handle is None:
                self._open()
            if self._size and self._size + len(data) > self._max_bytes:
                self._rotate()
            while data:
                if self._size >= self._max_bytes:
                    self._rotate()
                assert self._handle is not None
                written = os.write(self._handle, data[: self._max_bytes - self._size])
                self._size, data = self._size + written, data[written:]

    def _open(self) -> None:
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._handle).st_size

    def _rotate(self) -> None:
        """Move the log on. The new one is opened first: where none can be, nothing is moved and lines are lost."""
        new = self._path.with_name(f".{self._path.name}.new")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            names = [self._path, *(self._path.with_name(f"{self._path.name}.{i + 1}") for i in range(self._files))]
            for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
                if newer.exists():
                    os.replace(newer, older)
            os.replace(new, self._path)
        except OSError:
            os.close(handle)
            raise
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._size = handle, 0


class Shim:
    """Life of one worker, from start to ``exit.json``."""

    def __init__(self, folder: Path, order: ShimOrder) -> None:
        self._folder, self._order = folder, order
        self._log = RotatingLog(folder / LOG_FILE, max_bytes=order.log_max_bytes, files=order.log_files)
        self._tail = b""
        self._told = False
        self._stop_reason: str | None = None
        self._kill_at = float("inf")
        self._lease_mtime_ns = -1
        self._renewed_at = time.monotonic()

    def run(self) -> int:
        """Start the worker and stay until nothing of it is left. Returns this process's exit status."""
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        become_subreaper()
        try:
            child = self._start()
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: an argument with a NUL
            self._write_exit(pid=0, status=127, reason=f"could not start: {error}")
            return 1
        try:
            self._write_lease(child.pid)
        except OSError as error:
            print(f"shim: cannot write the lease in {self._folder}: {error}", file=sys.stderr)
            self._stop_reason = f"could not start: its lease cannot be written: {error}"
            signal_group(child.pid, signal.SIGKILL)
        self._watch(child, wakeup_read)
        signal_group(child.pid, signal.SIGKILL)  # before reaping: until then its group id cannot be reused
        self._pump(child)
        status = child.wait()
        end_all_children()
        self._write_exit(pid=child.pid, status=status, reason=self._stop_reason or "exited")
        return 0

    def _on_signal(self, _signum: int, _frame: object) -> None:
        self._told = True

    def _start(self) -> subprocess.Popen[bytes]:
        order, shim_pid = self._order, os.getpid()

        def prepare() -> None:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != shim_pid:  # the shim died before the line above took effect
                os._exit(1)
            if order.cores:
                os.sched_setaffinity(0, order.cores)

        child = subprocess.Popen(
            order.argv,
            cwd=self._folder,
            env={**os.environ, **order.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=prepare,  # safe: this process has one thread
        )
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        return child

    def _write_lease(self, pid: int) -> None:
        order, engine, shim = self._order, read_stat(pid), read_stat(os.getpid())
        assert engine is not None  # a child not waited for keeps its entry
        assert shim is not None
        write_file(
            self._folder / LEASE_FILE,
            Lease(
                worker_id=order.worker_id,
                pid=pid,
                start_time_ticks=engine.start_time_ticks,
                shim_pid=shim.pid,
                shim_start_time_ticks=shim.start_time_ticks,
                port=order.port,
                config_hash=order.config_hash,
                started_at=time.time(),
                lease_ttl_s=order.lease_ttl_s,
                boot_id=boot_id(),
            ),
        )

    def _watch(self, child: subprocess.Popen[bytes], wakeup: int) -> None:
        """Return when the worker's first process has ended (not yet reaped)."""
        assert child.stdout is not None
        tick_s = min(1.0, self._order.lease_ttl_s / 4, max(self._order.grace_s / 4, 0.05))
        exited = os.pidfd_open(child.pid)
        with selectors.DefaultSelector() as selector:
            for watched in (child.stdout, exited, wakeup):
                selector.register(watched, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(tick_s)}
                if child.stdout.fileno() in ready and not self._pump(child):
                    selector.unregister(child.stdout)  # closed by the worker; it may live on
                if wakeup in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wakeup, 512)
                if exited in ready:
                    break
                self._enforce(child.pid)
        os.close(exited)

    def _enforce(self, group_id: int) -> None:
        """Begin or finish ending the worker, if there is a reason."""
        now = time.monotonic()
        if self._stop_reason is None:
            if self._told:
                self._stop_reason = "told to stop"
            elif self._lease_expired(now):
                self._stop_reason = "lease expired"
            else:
                return
            self._kill_at = now + self._order.grace_s
            signal_group(group_id, signal.SIGTERM)
        elif now >= self._kill_at:
            signal_group(group_id, signal.SIGKILL)

    def _lease_expired(self, now: float) -> bool:
        """Time without renewal on the monotonic clock, so that setting the wall clock ends no worker."""
        try:
            mtime_ns = os.stat(self._folder / LEASE_FILE).st_mtime_ns
        except OSError:
            mtime_ns = self._lease_mtime_ns  # a lease that is gone is not being renewed
        if mtime_ns != self._lease_mtime_ns:
            self._lease_mtime_ns, self._renewed_at = mtime_ns, now
        return now - self._renewed_at > self._order.lease_ttl_s

    def _pump(self, child: subprocess.Popen[bytes]) -> bool:
        """Move what the worker printed into the log; False once its output is closed."""
        assert child.stdout is not None
        for _ in range(_READS_PER_LOOK):
            try:
                data = os.read(child.stdout.fileno(), _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._log.write(data)
            self._tail = (self._tail + data)[-self._order.log_tail_bytes :]
        return True

    def _write_exit(self, *, pid: int, status: int, reason: str) -> None:
        record = ExitRecord(
            worker_id=self._order.worker_id,
            pid=pid,
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            ended_at=time.time(),
            reason=reason,
            log_tail=self._tail.decode("utf-8", errors="replace"),
        )
        try:
            write_file(self._folder / EXIT_FILE, record)
        except OSError as error:
            print(f"shim: cannot write {EXIT_FILE}: {error}; {record}", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Keep the worker of folder ``argv[0]``. The folder's lock makes this its only shim."""
    raise_file_limit()  # the engine's as well
    folder = Path(argv[0])
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _LOCK_TRIES_S
    while True:  # a daemon that looks whether the lock is held holds it itself for a moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                print(f"shim: another one keeps {folder}", file=sys.stderr)
                return 1
            time.sleep(0.02)
    try:
        order = read_file(folder / COMMAND_FILE, ShimOrder)
    except LeaseFileError as error:  # withdrawn by a daemon that gave this start up for dead
        print(f"shim: {error}", file=sys.stderr)
        return 1
    return Shim(folder, order).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
