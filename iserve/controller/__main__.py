"""``python -m iserve.controller``: run the controller of this home until it is told to stop.

Settings come from ``ISERVE_*``. One controller per home: a second one is refused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn

from daemon.own_log import bound_own_log, log_to_stderr
from daemon.process import ProcessRecord, is_alive, own_record, read_record, write_record
from fingerprint.errors import ConflictError, IserveError, UnavailableError
from iserve.controller.app import create_app
from iserve.controller.http_protocol import BoundedProtocol
from iserve.controller.reconcile import Reconciler
from iserve.controller.service import Controller
from iserve.settings import Settings, load_settings
from iserve.state.store import Store

log = logging.getLogger("iserve.controller")

_BACKLOG = 64  # also how many are accepted at a time


@contextmanager
def _only_one(settings: Settings) -> Iterator[None]:
    """Hold the home's lock.

    Raises:
        ConflictError: another controller holds it.
        UnavailableError: the home cannot be written.
    """
    lock = settings.run_folder / "controller.lock"
    try:
        settings.run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UnavailableError(
            f"cannot write {lock}: {error.strerror}; mend the folder, or set ISERVE_HOME to another one"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _await_record(settings)
            who = "" if holder is None else f" (pid {holder.pid}, {holder.url})"
            raise ConflictError(
                f"another controller{who} runs on {settings.home}; use it, or set ISERVE_HOME to another folder"
            ) from error
        yield
    finally:
        os.close(handle)


def _await_record(settings: Settings, *, patience_s: float = 5.0) -> ProcessRecord | None:
    """The record of whoever holds the lock, who may only just have taken it."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        record = read_record(settings.run_folder / "controller.json")
        if is_alive(record):
            return record
        time.sleep(0.05)
    return None


def _listen(settings: Settings) -> socket.socket:
    """Listening before anything is started, so that a port in use costs nothing; who connects is answered later.

    A port that is only bound could be bound, and then listened on, by another home's controller as well.

    Raises:
        ConflictError: the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.api_port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConflictError(
            f"the REST API cannot listen on {settings.host}:{settings.api_port}: {error.strerror}; "
            "set ISERVE_API_PORT to a free port"
        ) from error
    return listener


def _start_companions(controller: Controller, reconciler: Reconciler) -> None:
    """Find or start daemon and gateway; when one does not come up, end what was started here.

    Raises:
        UnavailableError: one does not come up (the gateway's port is in use, say).
    """
    absent = [c for c in (controller.daemon_process, controller.gateway_process) if c.record() is None]
    try:
        controller.daemon_process.ensure()
        reconciler.publish(controller.store.deployments(), controller.observe())
        controller.gateway_process.ensure()
    except BaseException:
        for companion in absent:
            companion.stop()
        raise


def run(settings: Settings) -> None:
    """Serve until SIGTERM. The daemon, the gateway and the workers go on without it."""
    path = settings.run_folder / "controller.json"
    bound_own_log(settings.log_folder / "controller.log")
    with _only_one(settings), ExitStack() as at_the_end:
        # What a profile left whose controller was killed: from here on nobody else uses it.
        shutil.rmtree(settings.fingerprint_folder, ignore_errors=True)
        listener = _listen(settings)
        at_the_end.callback(listener.close)
        host, port = listener.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        token = secrets.token_urlsafe(32)
        # First of all: `iserve down`, and a second start, must find a controller that is still starting.
        write_record(path, own_record(url=f"http://{url_host}:{port}", token=token))
        at_the_end.callback(path.unlink, missing_ok=True)
        store = Store.open(settings.state)
        at_the_end.callback(store.close)
        controller = Controller(settings, store)
        at_the_end.callback(controller.close)
        reconciler = Reconciler(controller)
        at_the_end.callback(reconciler.stop)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(controller, token),
                loop="asyncio",  # with uvloop installed, which is for the gateway, uvicorn would take that
                http=BoundedProtocol,
                backlog=_BACKLOG,
                log_config=None,
                access_log=False,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=65_536,
            )
        )
        _start_companions(controller, reconciler)
        reconciler.start()
        log.info("controller on %s:%d, home %s", host, port, settings.home)
        server.run(sockets=[listener])


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    """0 after a signal, 1 refused with one line on stderr."""
    log_to_stderr()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _terminate)  # until uvicorn takes over
    try:
        run(load_settings())
    except IserveError as error:
        print(f"iserve: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except SystemExit:  # of SIGTERM; uvicorn, once it has shut down, raises the signal that it caught again
        return 0
    return 0


if __name__ == "__main__":
    code = main()
    # A deploy under way would hold the interpreter's end up for as long as a profile takes. It goes on from its
    # record when the next controller starts, as after a crash.
    logging.shutdown()
    os._exit(code)
