"""``python -m iserve.gateway --home DIR --host 127.0.0.1 --port 8080``: run the gateway until SIGTERM.

Exit codes: 0 stopped, 1 cannot run (one line on stderr), 98 the port is in use (one line on stderr).
"""

from __future__ import annotations

import argparse
import errno
import gc
import secrets
import signal
import socket
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from daemon.atomic_file import remove_stale_temporaries
from daemon.file_limit import raise_file_limit
from daemon.log_rotation import bound_log, log_to_stderr
from daemon.process import kept_record, own_record
from fingerprint.errors import IserveError
from iserve.gateway.app import Gateway
from iserve.gateway.event_loop import EventLoop, event_loop
from iserve.gateway.http_server import GatewayProtocol, max_connections
from placement.variant_routing import DEFAULT_VARIANT_POLICY, VARIANT_POLICIES

if TYPE_CHECKING:
    from daemon.variants.base_checks import BaseChecks
    from daemon.variants.store import VariantStore

__all__ = ["main"]

_EXIT_PORT_IN_USE = 98  # EADDRINUSE on Linux
_BACKLOG = 2048
_GC_THRESHOLDS = (50_000, 50, 50)  # docs/decisions/0006-gateway.md


def main(argv: list[str] | None = None) -> int:
    """Bind, leave a record of this process in ``run/gateway.json``, serve."""
    args = _parser().parse_args(argv)
    raise_file_limit()
    log_to_stderr()
    signal.signal(signal.SIGTERM, _end)  # uvicorn re-raises the signal after its clean shutdown; then exit with 0
    bound_log((args.home / "logs" / "gateway.log").absolute())
    run = args.home / "run"
    record_path = run / "gateway.json"
    try:
        listener = _listen(args.host, args.port)
    except OSError as error:
        print(_bind_failure(args.host, args.port, error), file=sys.stderr)
        return _EXIT_PORT_IN_USE if error.errno == errno.EADDRINUSE else 1
    record = own_record(
        url=_url(args.host, listener.getsockname()[1]),
        token=secrets.token_urlsafe(32),
        settings={
            "ISERVE_HOST": args.host,
            "ISERVE_PORT": str(args.port),
            "ISERVE_VARIANT_POLICY": args.variant_policy,
        },
    )
    remove_stale_temporaries(run, record_path.name)
    try:
        with kept_record(record_path, record), suppress(KeyboardInterrupt):
            loop = event_loop()
            print(f"iserve gateway on {record.url}, routes from {run / 'routes.json'}", file=sys.stderr)
            print(f"event loop: {loop.text}", file=sys.stderr, flush=True)
            folders = _StoredVariants((args.home / "variants").absolute())
            gateway = Gateway(run / "routes.json", record.token, folders, args.variant_policy)
            _serve(gateway, listener, loop, args.grace)
    except IserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class _StoredVariants:
    """The variant store, imported with the first variant that is loaded: most gateways do without."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def _bases(self) -> BaseChecks:
        from daemon.variants.base_checks import BaseChecks  # type: ignore[import-untyped, unused-ignore]

        return BaseChecks()

    @cached_property
    def _store(self) -> VariantStore:  # one, which remembers what it has read
        from daemon.variants.store import VariantStore  # type: ignore[import-untyped, unused-ignore]

        return VariantStore(self.root)

    def loadable(self, content_hash: str) -> Path:
        folder: Path = self._store.loadable(content_hash)
        return folder

    def checked(self, content_hash: str, base: Path) -> Path:
        if (manifest := self._store.delta(content_hash)) is not None:
            self._bases.check(base, manifest)
        folder: Path = self._store.verified(content_hash)
        return folder


def _serve(gateway: Gateway, listener: socket.socket, loop: EventLoop, grace_s: int) -> None:
    config = uvicorn.Config(
        gateway,
        loop=loop.name,
        http=GatewayProtocol,
        backlog=min(_BACKLOG, max_connections()),  # so many are accepted at a time
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=grace_s,
    )
    # All that is alive now stays: keep the collector from walking it, and from walking often (a full pass over a
    # few hundred thousand objects stops every stream for tens of milliseconds).
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that already listens, so that an early client waits instead of being refused."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"error: port {port} on {host} is in use; stop its program or set ISERVE_PORT to another"
    return f"error: cannot listen on {host} port {port}: {error.strerror or error}"


def _url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches us: a wildcard address is listened on, not called."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError(text)
    return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="iserve.gateway", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--home", type=Path, required=True, help="the ISERVE_HOME whose run/routes.json is served")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=_port, default=8080, help="0 lets the system choose; run/gateway.json then says"
    )
    parser.add_argument(
        "--variant-policy",
        choices=tuple(VARIANT_POLICIES),
        default=DEFAULT_VARIANT_POLICY,
        help="choice of the worker for a variant's request",
    )
    parser.add_argument("--grace", type=int, default=30, help="seconds that streams may go on after SIGTERM")
    return parser


if __name__ == "__main__":
    sys.exit(main())
