"""The last good route table: read from a file that another process replaces, kept whatever becomes of the file."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

from fingerprint.codec import from_json
from fingerprint.errors import BadInputError
from iserve.route_table import Route, RouteTable

__all__ = ["RoutesFile"]

_MAX_FILE_BYTES = 64 * 2**20

_log = logging.getLogger(__name__)


class RoutesFile:
    """``table`` is the last one that could be read; None until the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table: RouteTable | None = None
        self.rejected = 0  # versions of the file that could not be used
        self._seen: tuple[int, int, int] | None = None
        self._complaint = ""

    def poll(self) -> bool:
        """Look once; True when a new table is in force. Costs one stat() when nothing has changed."""
        try:
            stat = os.stat(self.path)
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen == self._seen:
                return False
            if stat.st_size > _MAX_FILE_BYTES:
                raise BadInputError(f"{self.path} has {stat.st_size} bytes, more than {_MAX_FILE_BYTES}")
            table = _checked(from_json(self.path.read_bytes(), RouteTable, what=str(self.path)))
        except OSError as error:  # gone or unreadable now: look again next time
            self._complain(f"cannot read {self.path}: {error.strerror or error}")
            return False
        except BadInputError as error:
            self._seen = seen
            self.rejected += 1
            self._complain(str(error))
            return False
        self._seen, self._complaint, self.table = seen, "", table
        _log.info("routes version %d: %d deployments", table.version, len(table.routes))
        return True

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            in_force = f"version {self.table.version} stays in force" if self.table else "there is no earlier one"
            _log.error("%s; %s", what, in_force)
            self._complaint = what


def _checked(table: RouteTable) -> RouteTable:
    """Return the table itself, once everything the hot path relies on is known to hold."""
    names = [route.name for route in table.routes]
    if len(set(names)) != len(names):
        raise BadInputError(f"route table version {table.version} names a deployment twice")
    for route in table.routes:
        _check_variants(route)
        for worker in route.workers:
            if not _is_worker_url(worker.url):
                raise BadInputError(f"worker {worker.worker_id} has the url {worker.url!r}; need http://HOST:PORT")
            if worker.max_outstanding < 1:
                raise BadInputError(f"worker {worker.worker_id} has max_outstanding {worker.max_outstanding} < 1")
    return table


def _check_variants(route: Route) -> None:
    if not route.variants:
        return
    if not 1 <= route.adapter_slots <= route.loaded_adapters:
        raise BadInputError(
            f"route {route.name} has variants; it needs 1 <= adapter_slots <= loaded_adapters, "
            f"got {route.adapter_slots} and {route.loaded_adapters}"
        )
    for names in ({one.name for one in route.variants}, {one.engine_name for one in route.variants}):
        if len(names) != len(route.variants):
            raise BadInputError(f"route {route.name} names a variant twice")


def _is_worker_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is no number or too large, brackets that do not match
        return False
    extra = parts.username is not None or parts.query or parts.fragment or parts.path not in ("", "/")
    return parts.scheme == "http" and bool(parts.hostname) and port is not None and not extra
