"""The daemon's HTTP face on loopback: the routes of docs/architecture.md over one supervisor. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from daemon.atomic_file import remove_stale_temporaries
from daemon.bounded_http import BoundedRunner
from daemon.devices import CpuDevices, DeviceSource
from daemon.engines.base import Engine
from daemon.file_limit import most_connections
from daemon.http_log import log_bad_requests_in_one_line
from daemon.monitor import Monitor
from daemon.nvml import NvmlDevices
from daemon.process import kept_record, own_record
from daemon.role_lock import hold_role
from daemon.settings import DaemonSettings
from daemon.supervisor import Supervisor
from daemon.worker_log import MAX_LOG_LINES, log_after, log_end
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.errors import (
    BadInputError,
    ConflictError,
    EngineError,
    InfeasibleError,
    IserveError,
    NotFoundError,
    UnavailableError,
)

__all__ = ["find_devices", "make_app", "serve"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
MAX_CONNECTIONS = 256  # each call of our own clients takes one, for as long as its answer takes
ARRIVE_S = 30.0  # for the head of a request, and again for its body
RECORD_FILE = "daemon.json"
DEFAULT_CPU_DEVICES = 2

# The first class that matches decides; anything else is a bug and a 500.
_STATUS: tuple[tuple[type[IserveError], int], ...] = (
    (NotFoundError, 404),
    (BadInputError, 400),
    (ConflictError, 409),
    (InfeasibleError, 409),
    (UnavailableError, 503),
    (EngineError, 503),
)
_SUPERVISOR = web.AppKey("supervisor", Supervisor)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def _refuse(name: str, message: str, status: int) -> web.Response:
    return _answer({"error": name, "message": message}, status)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except IserveError as error:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 503)
        return _refuse(type(error).__name__, str(error), status)
    except web.HTTPRequestEntityTooLarge:
        return _refuse("BadInputError", f"the body is larger than {MAX_BODY_BYTES} bytes", 413)
    except web.HTTPException as error:
        name = "NotFoundError" if error.status == 404 else "BadInputError"
        return _refuse(name, f"{request.method} {request.path}: {error.reason}", error.status)


def _authentication(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != "/healthz" and not hmac.compare_digest(given, expected):
            return _refuse("BadInputError", "the Authorization header does not carry this daemon's token", 401)
        return await handler(request)

    return check


async def _healthz(_request: web.Request) -> web.Response:
    return _answer({"status": "ok"})


async def _node(request: web.Request) -> web.Response:
    return _answer(request.app[_SUPERVISOR].node())


async def _workers(request: web.Request) -> web.Response:
    return _answer(request.app[_SUPERVISOR].workers())


async def _launch(request: web.Request) -> web.Response:
    spec = from_json(await request.read(), WorkerSpec, what="the request body")
    return _answer(await request.app[_SUPERVISOR].launch(spec), 201)


async def _worker(request: web.Request) -> web.Response:
    return _answer(request.app[_SUPERVISOR].worker(request.match_info["id"]))


async def _stop(request: web.Request) -> web.Response:
    return _answer(await request.app[_SUPERVISOR].stop(request.match_info["id"]))


async def _log(request: web.Request) -> web.Response:
    part = await asyncio.to_thread(log_end, _log_path(request), _lines(request))
    return web.Response(text=part.text, content_type="text/plain")


async def _log_part(request: web.Request) -> web.Response:
    path, position = _log_path(request), request.query.get("position")
    if position is None:
        return _answer(await asyncio.to_thread(log_end, path, _lines(request)))
    return _answer(await asyncio.to_thread(log_after, path, position))


def _log_path(request: web.Request) -> Path:
    return request.app[_SUPERVISOR].log_path(request.match_info["id"])


def _lines(request: web.Request) -> int:
    text = request.query.get("lines", "200")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LOG_LINES):
        raise BadInputError(f"lines must be a number from 1 to {MAX_LOG_LINES}, got {text[:40]!r}")
    return int(text)


def make_app(supervisor: Supervisor, token: str) -> web.Application:
    """Return the routes over ``supervisor``, which must be open."""
    app = web.Application(middlewares=[_errors, _authentication(token)], client_max_size=MAX_BODY_BYTES)
    app[_SUPERVISOR] = supervisor
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/v1/node", _node),
            web.get("/v1/workers", _workers),
            web.post("/v1/workers", _launch),
            web.get("/v1/workers/{id}", _worker),
            web.delete("/v1/workers/{id}", _stop),
            web.get("/v1/workers/{id}/log", _log),
            web.get("/v1/workers/{id}/log/part", _log_part),
        ]
    )
    return app


def find_devices(cpu_devices: int | None) -> DeviceSource:
    """Return the node's GPUs; CPU shares where there is none, or where a number of them is asked for."""
    if cpu_devices is None:
        import pynvml

        gpus = NvmlDevices.open(pynvml)
        if gpus is not None:
            return gpus
    return CpuDevices(DEFAULT_CPU_DEVICES if cpu_devices is None else cpu_devices)


@contextlib.asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve ``app``; yields its URL. Raises ConflictError: the port is in use."""
    log_bad_requests_in_one_line()
    runner = BoundedRunner(
        app, most=most_connections(MAX_CONNECTIONS), wait_s=ARRIVE_S, access_log=None, shutdown_timeout=2.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConflictError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()


async def serve(settings: DaemonSettings, engines: Callable[[str], Engine]) -> None:
    """Run as this home's daemon until SIGTERM or SIGINT; the workers run on afterwards.

    Raises:
        ConflictError: another daemon has this home, or the port is in use.
        UnavailableError: the home cannot be read or written.
    """
    if settings.host not in ("127.0.0.1", "::1", "localhost"):
        raise BadInputError(f"the daemon listens on loopback only, not on {settings.host!r}")
    leave = asyncio.Event()
    taken = f"a daemon for {settings.run_folder.parent} runs already; stop it or use another home"
    with hold_role(settings.run_folder, "daemon", lambda _: taken):
        for signum in (signal.SIGTERM, signal.SIGINT):  # while the lock was waited for, they ended the process
            asyncio.get_running_loop().add_signal_handler(signum, leave.set)
        remove_stale_temporaries(settings.run_folder, RECORD_FILE)
        source = find_devices(settings.cpu_devices)
        monitor = Monitor(source, window_s=settings.load_window_s)
        supervisor = Supervisor(settings, monitor, engines)
        token = secrets.token_urlsafe(32)
        try:
            await supervisor.open()
            async with _listening(make_app(supervisor, token), settings.host, settings.port) as url:
                with kept_record(settings.run_folder / RECORD_FILE, own_record(url=url, token=token)):
                    log.info("daemon of %s at %s, devices %s", settings.home, url, list(monitor.devices))
                    await supervisor.run(until=leave)
        finally:
            await supervisor.close()
            source.close()
