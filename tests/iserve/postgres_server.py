"""PostgreSQL server of the tests' own: in a temporary folder, on a Unix socket, as the user `nobody` under root.

PostgreSQL refuses to run as root. What it does on disk is real but for fsync: no machine loses its power here.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa

WAIT_S = 60.0  # far beyond what is needed


def binaries() -> Path | None:
    """The folder of ``postgres`` and ``initdb``: on the PATH, or where Debian's package puts them."""
    found = shutil.which("postgres")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: float(p.parts[-3]))
    return versions[-1].parent if versions else None


class PostgresServer:
    """Started with the block and gone after it, its folder too."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        # A socket's path has 107 characters at most, and no other user must get there.
        self.folder = Path(tempfile.mkdtemp(prefix="iserve-pg-", dir="/tmp"))
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)

    def __enter__(self) -> PostgresServer:
        make = [self._programs / "initdb", "-D", self.folder / "data", "-U", "iserve", "-A", "trust", "--no-sync"]
        done = subprocess.run(
            [*map(str, make), "--encoding=UTF8", "--locale=C"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            **self._as,
        )
        assert done.returncode == 0, done.stderr
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder)

    def start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-F", "-k", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-c", "listen_addresses=", "-c", "max_connections=40"],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._as,
            )
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(sa.exc.OperationalError):
                self.query("SELECT 1")
                return
            time.sleep(0.02)
        raise AssertionError((self.folder / "log").read_text())

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """``SIGINT``: sessions are ended, all is written. ``SIGQUIT``: at once, as in a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(WAIT_S)
            self._process = None

    def query(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement as its superuser, committed at once."""
        engine = sa.create_engine(
            self.url(database).replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
        )
        try:
            with engine.connect() as connection:
                result = connection.exec_driver_sql(statement)
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            engine.dispose()

    def url(self, database: str) -> str:
        return f"postgresql://iserve@/{database}?host={self.folder}"

    def make_database(self) -> str:
        """The URL of a new, empty database."""
        name = f"t{uuid.uuid4().hex}"
        self.query(f"CREATE DATABASE {name}")
        return self.url(name)

    def sessions(self, url: str) -> list[str]:
        """The application names of those who are connected to a database now."""
        name = sa.make_url(url).database
        return [
            row[0] for row in self.query(f"SELECT application_name FROM pg_stat_activity WHERE datname = '{name}'")
        ]
