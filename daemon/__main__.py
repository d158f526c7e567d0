"""``python -m daemon --home DIR``: run this node's daemon until it is asked to stop."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from daemon.engines.registry import get_engine
from daemon.file_limit import raise_file_limit
from daemon.log_rotation import bound_log, log_to_stderr
from daemon.server import serve
from daemon.settings import DaemonSettings
from fingerprint.errors import IserveError


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 after a signal, 1 refused with one line on stderr, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="python -m daemon", description="Watch this node; start and watch workers."
    )
    parser.add_argument("--home", type=Path, required=True, help="iServe's home folder")
    parser.add_argument("--port", type=int, default=0, help="0: any free one (run/daemon.json tells)")
    parser.add_argument("--cpu-devices", type=int, default=None, help="offer the CPU as so many devices, no GPU")
    parser.add_argument(
        "--start-timeout", type=float, default=None, metavar="SECONDS", help="for a worker to become healthy"
    )
    parser.add_argument("--node-id", default=None, help="default: the host name")
    arguments = parser.parse_args(argv)
    raise_file_limit()
    log_to_stderr()
    given: dict[str, Any] = {"node_id": arguments.node_id, "start_timeout_s": arguments.start_timeout}
    try:
        settings = DaemonSettings(
            home=arguments.home.absolute(),
            port=arguments.port,
            cpu_devices=arguments.cpu_devices,
            **{name: value for name, value in given.items() if value is not None},
        )
        os.environ["ISERVE_HOME"] = str(settings.home)  # where adapters look for environments of engines
        bound_log(settings.home / "logs" / "daemon.log")
        asyncio.run(serve(settings, get_engine))
    except IserveError as error:
        print(f"daemon: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
