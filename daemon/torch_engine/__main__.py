"""The worker process: ``python -m daemon.torch_engine --spec FILE [--lease FILE]``.

Binds its port, loads, serves, and ends: by a signal or a lease that ran out after draining (0), or by a failure
with one of ``exit_codes``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from daemon import exit_codes
from daemon.file_limit import most_connections, raise_file_limit
from daemon.torch_engine.trimmed_imports import trimmed_imports
from daemon.worker_spec import WorkerSpec
from daemon.worker_token import read_token
from fingerprint.codec import from_json
from fingerprint.errors import (
    BadInputError,
    ConfigError,
    ConflictError,
    IserveError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    from daemon.bounded_http import BoundedRunner
    from daemon.torch_engine.api.server import Worker
    from daemon.torch_engine.runner_types import Runner

DRAIN_LIMIT_S = 30.0
_CLOSE_LIMIT_S = 10.0
_LEASE_CHECK_S = 5.0
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})  # why one cannot listen now
_MAX_CONNECTIONS = 1024  # one for each request that runs or waits
_ARRIVE_S = (
    75.0  # for the head of a request, and again for its body, of whose lateness the server itself says more
)
_LAST_FRAMES_S = 1.0  # for error frames to reach their clients before the process ends

_log = logging.getLogger("iserve.worker")


def main(argv: list[str] | None = None, make_runner: Callable[[], Runner] | None = None) -> int:
    """Run a worker to its end; returns the exit code. ``make_runner`` is for tests."""
    parser = argparse.ArgumentParser(prog="python -m daemon.torch_engine", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="a WorkerSpec as JSON")
    parser.add_argument("--lease", type=Path, help="a file whose age is the lease's")
    options = parser.parse_args(argv)
    raise_file_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    folder = options.spec.parent if options.spec.parent.is_dir() else None
    if folder is not None:
        with contextlib.suppress(OSError):  # in a container the folder is read-only
            (folder / exit_codes.STARTUP_ERROR_FILE).unlink(missing_ok=True)
    try:
        spec, token = _read_spec(options.spec), _read_token(options.spec.parent)
        listener = _bind(spec)
    except IserveError as error:
        exit_codes.report_failure(folder, error)
        return exit_codes.PORT_IN_USE if isinstance(error, ConflictError) else _exit_code(error)
    # The engine's and the event loop's threads take turns many times a step; the default of 5 ms would show in it.
    sys.setswitchinterval(0.0005)
    return asyncio.run(_serve(spec, token, listener, options.lease, folder, make_runner or _torch_runner))


def _read_spec(path: Path) -> WorkerSpec:
    try:
        return from_json(path.read_bytes(), WorkerSpec, what=str(path))
    except OSError as error:
        raise NotFoundError(f"cannot read the worker's spec: {error}") from error


def _read_token(folder: Path) -> str | None:
    try:
        return read_token(folder)
    except OSError as error:
        raise UnavailableError(f"cannot read the worker's token: {error}") from error


def _bind(spec: WorkerSpec) -> socket.socket:
    """Return the listening socket, before anything slow, so that a taken port is known at once.

    Raises:
        ConflictError: the port is in use.
        ConfigError: an address or port that cannot be listened on here.
        UnavailableError: it cannot be now, for a reason that may pass (no file descriptor is left, say).
    """
    asked = f"cannot listen on {spec.host}:{spec.port}"
    listener = None
    try:
        listener = socket.socket(socket.AF_INET6 if ":" in spec.host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((spec.host, spec.port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRINUSE:
            raise ConflictError(f"{asked}: {error}; choose another port") from error
        if number in _PASSING:
            raise UnavailableError(f"{asked}: {error}; try again later") from error
        raise ConfigError(f"{asked}: {error}; give an address of this machine and a port it may use") from error
    return listener


def _torch_runner() -> Runner:
    from daemon.torch_engine.parallel.runner import LocalRunner

    return LocalRunner()


async def _serve(
    spec: WorkerSpec,
    token: str | None,
    listener: socket.socket,
    lease: Path | None,
    folder: Path | None,
    make_runner: Callable[[], Runner],
) -> int:
    with trimmed_imports():
        from aiohttp import web

        from daemon.bounded_http import BoundedRunner
        from daemon.http_log import log_bad_requests_in_one_line
        from daemon.torch_engine.api.server import Worker, make_app

    log_bad_requests_in_one_line()
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[BaseException] = loop.create_future()

    def on_failure(error: BaseException) -> None:  # in the engine's thread
        loop.call_soon_threadsafe(lambda: failure.done() or failure.set_result(error))

    stop, hurry = _stop_signals(loop)
    with trimmed_imports():
        runner = make_runner()
    worker = Worker(spec, runner, failed=on_failure)
    app = BoundedRunner(
        make_app(worker, token),
        most=most_connections(_MAX_CONNECTIONS),
        wait_s=_ARRIVE_S,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
    )
    await app.setup()
    await web.SockSite(app, listener).start()
    _log.info("worker %s listens on %s:%d", spec.worker_id, *listener.getsockname()[:2])
    tasks = {
        "start": asyncio.create_task(worker.start()),
        "stop": asyncio.create_task(stop.wait()),
        "lease": asyncio.create_task(_lease_ended(lease, spec.lease_ttl_s)),
    }
    error = await _until_over(tasks, failure)
    if error is None:
        _log.info("draining: %s", "asked to stop" if stop.is_set() else "the lease has run out")
        drain = asyncio.create_task(worker.drain(DRAIN_LIMIT_S))
        await asyncio.wait({drain, asyncio.create_task(hurry.wait())}, return_when=asyncio.FIRST_COMPLETED)
    else:
        exit_codes.report_failure(folder, error)
        await asyncio.sleep(_LAST_FRAMES_S)
    return await _close(worker, app, 0 if error is None else _exit_code(error))


def _stop_signals(loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Event, asyncio.Event]:
    """Return the events of the first signal to end, which drains, and of the second, which cuts that short."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop, hurry


async def _close(worker: Worker, app: BoundedRunner, code: int) -> int:
    """End the engine and the server and return the exit code; a process whose engine does not end is exited."""
    closed = await asyncio.to_thread(worker.engine.close, _CLOSE_LIMIT_S)
    await asyncio.sleep(0)  # the closing engine's last events
    await app.cleanup()
    if not closed:
        if worker.engine.has_work:
            _log.error("the engine did not end within %.0f s", _CLOSE_LIMIT_S)
            code = code or exit_codes.ENGINE_FAILED
        else:
            _log.info("ended in the middle of a load")  # no answer is lost
        os._exit(code)
    return code


async def _until_over(
    tasks: dict[str, asyncio.Task], failure: asyncio.Future[BaseException]
) -> BaseException | None:
    """Wait for the end of the worker: None when it was asked to end, else why it cannot go on."""
    waiting = {*tasks.values(), failure}
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if failure in done:
            return failure.result()
        if tasks["start"] in done:
            error = tasks["start"].exception()
            if error is not None:
                if not isinstance(error, IserveError):
                    _log.error("the worker did not become ready: unexpected error", exc_info=error)
                return error
            _log.info("ready")
        if tasks["stop"] in done or tasks["lease"] in done:
            return None


async def _lease_ended(lease: Path | None, ttl_s: float) -> None:
    """Return once the lease has not been touched for its time to live; never without a lease.

    Time without a touch is measured on the monotonic clock: setting the wall clock ends no worker and keeps none.
    """
    if lease is None:
        await asyncio.Event().wait()
        return
    touched_ns, touched_at_s = None, time.monotonic()
    while time.monotonic() - touched_at_s <= ttl_s:
        await asyncio.sleep(min(_LEASE_CHECK_S, ttl_s / 4))
        try:
            seen_ns = lease.stat().st_mtime_ns
        except OSError:
            continue  # being replaced, or gone: then it ages
        if seen_ns != touched_ns:
            touched_ns, touched_at_s = seen_ns, time.monotonic()


def _exit_code(error: BaseException) -> int:
    """Return the exit code of the first error in the chain of causes that says more than "it failed"."""
    cause: BaseException | None = error
    while cause is not None:
        if exit_codes.is_out_of_memory(cause):
            return exit_codes.OUT_OF_MEMORY
        if isinstance(cause, BadInputError):
            return exit_codes.BAD_CHECKPOINT
        cause = cause.__cause__
    return exit_codes.ENGINE_FAILED


if __name__ == "__main__":
    sys.exit(main())
