"""``python -m iserve.controller``: run the controller of this home until it is asked to stop.

Settings come from ``ISERVE_*``. One controller per home: a second one is refused.
"""

from __future__ import annotations

import gc

gc.disable()  # until all is imported and made: an eighth of a start would be the collector's

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from contextlib import ExitStack
from types import FrameType

import uvicorn

from daemon.atomic_file import remove_stale_temporaries
from daemon.file_limit import raise_file_limit
from daemon.log_rotation import bound_log, log_to_stderr
from daemon.process import kept_record, own_record
from fingerprint.errors import ConflictError, IserveError
from iserve.client import check_running_settings
from iserve.controller.app import create_app
from iserve.controller.home_lock import hold_home
from iserve.controller.http_protocol import BoundedProtocol
from iserve.controller.reconcile import ROUTES_FILE, Reconciler
from iserve.controller.service import Controller
from iserve.settings import Settings, load_settings
from iserve.state.store import Store

log = logging.getLogger("iserve.controller")

_BACKLOG = 1024  # also how many are accepted at a time


def _listen(settings: Settings) -> socket.socket:
    """Return a listening socket before anything is started, so that a port in use costs nothing.

    A client that connects early is answered later. A port that is only bound could be bound, and then listened on,
    by another home's controller as well.

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
    """Find or start daemon and gateway; when one does not start, end what was started here.

    Raises:
        UnavailableError: one does not start (the gateway's port is in use, say).
    """
    absent = [c for c in (controller.daemon_process, controller.gateway_process) if c.record() is None]
    try:
        controller.daemon_process.ensure()
        reconciler.publish(controller.store.deployments(), controller.observe())
        controller.gateway_process.ensure()
    except BaseException:
        for child in absent:
            child.stop()
        raise


def run(settings: Settings) -> None:
    """Serve until SIGTERM. The daemon, the gateway and the workers go on without it.

    Raises:
        ConflictError: the gateway that runs was started with other settings, on an address for which the keys that
            these settings require may not be enough.
    """
    path = settings.run_folder / "controller.json"
    bound_log(settings.log_folder / "controller.log")
    with hold_home(settings), ExitStack() as at_the_end:
        check_running_settings(settings)
        remove_stale_temporaries(settings.run_folder, path.name, ROUTES_FILE)
        # What a profile left whose controller was killed: from here on nothing else uses it.
        shutil.rmtree(settings.fingerprint_folder, ignore_errors=True)
        listener = _listen(settings)
        at_the_end.callback(listener.close)
        host, port = listener.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        token = secrets.token_urlsafe(32)
        # First of all: `iserve down`, and a second start, must find a controller that is still starting.
        record = own_record(url=f"http://{url_host}:{port}", token=token, settings=settings.recorded())
        at_the_end.enter_context(kept_record(path, record))
        store = Store.open(settings.state, merged_folder=settings.merged_folder)
        at_the_end.callback(store.close)
        controller = Controller(settings, store)
        at_the_end.callback(controller.close)
        controller.variants.collect_soon()
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
        gc.freeze()
        gc.enable()
        _start_companions(controller, reconciler)
        reconciler.start()
        log.info("controller on %s:%d, home %s", host, port, settings.home)
        server.run(sockets=[listener])


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    """Run the controller; return 0 after a signal, 1 refused with one line on stderr."""
    raise_file_limit()
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
