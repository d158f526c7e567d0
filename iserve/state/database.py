"""Database of the state, a SQLite file or a PostgreSQL database: connections, transactions, migrations.

Both have one writer at a time, so that transactions follow one another and none has to be tried again. In a
SQLite file that is a lock of this process, the file's home being its own (``run/controller.lock``). In PostgreSQL
it is one session, and that session holds an advisory lock: of several controllers of one database one writes, and
one whose session has ended cannot write what was meant for it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.resources import as_file, files
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, SQLAlchemyError

from fingerprint.errors import BadInputError, ConfigError, ConflictError, IserveError, StateUnavailableError

__all__ = ["Database", "open_database"]

_LOCK_ID = 0x69_53_65_72_76_65  # "iServe": the advisory lock of the writer; one for each database
_OPENING_PATIENCE_S = 10.0  # a controller that was killed a moment ago: the server has yet to see that
_RETAKING_PATIENCE_S = 1.0  # its own former session, say; meanwhile a write waits
_LOCK_HELD_BY = sa.text(
    "SELECT s.application_name FROM pg_locks l JOIN pg_stat_activity s USING (pid)"
    " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
    " AND ((l.classid::bigint << 32) | l.objid::bigint) = :id AND s.datname = current_database()"
)


def open_database(where: Path | str, *, read_only: bool = False) -> Database:
    """Return the database at a path (SQLite) or a URL (PostgreSQL); nothing is asked of it yet.

    Args:
        read_only: in addition to the controller that owns it.

    Raises:
        ConfigError: not such a URL, or PostgreSQL's driver is not installed.
    """
    return _File(where, read_only=read_only) if isinstance(where, Path) else _Server(where)


class Database(ABC):
    """Safe to use from several threads of one process.

    Raises (every method):
        StateUnavailableError: it cannot be read or written (away, disk full, locked, damaged).
    """

    _engine: sa.Engine

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @abstractmethod
    def is_new(self) -> bool:
        """Return whether no iServe has ever written here."""

    def hold(self) -> None:
        """See that this process is still the one that writes.

        Raises:
            StateUnavailableError: also when another controller has taken the database.
        """
        with self._reported("written"), self._lock:
            self._keep()

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Run one transaction: all of it is there for good when this ends without an error, else none of it.

        Raises:
            IntegrityError: a row is there already.
            BadInputError: a value that the database cannot keep (a zero byte).
        """
        with self._reported("written"), self._lock, self._transaction() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Read for one query, of what has been committed."""
        with self._reported("read"), self._engine.connect() as connection:
            yield connection

    def migrate(self, to: str = "head") -> None:
        """Migrate all of it or nothing: a process that is killed in the middle leaves the old schema.

        Raises:
            ConflictError: another controller runs on this database.
        """
        from alembic import command  # a quarter of a second to load, and a reader never migrates
        from alembic.config import Config
        from alembic.util import CommandError

        with self._reported("written"), self._lock:
            self._prepare()
        config = Config()
        with as_file(files("iserve.state") / "migrations") as scripts, self.write() as connection:
            config.set_main_option("script_location", str(scripts))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, to)
            except CommandError as error:
                raise StateUnavailableError(
                    f"the state database is of another version of iServe ({error}); use that one, or another "
                    "ISERVE_HOME or ISERVE_DATABASE_URL"
                ) from error

    def close(self) -> None:
        self._engine.dispose()

    @abstractmethod
    def _prepare(self) -> None:
        """Prepare whatever the first write needs."""

    @abstractmethod
    def _keep(self) -> None: ...

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[sa.Connection]: ...

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except DataError as error:
            raise BadInputError(f"the state database cannot keep that: {_cause(error)}") from error
        except SQLAlchemyError as error:
            raise StateUnavailableError(f"the state database cannot be {what}: {self._why(error)}") from error

    def _why(self, error: SQLAlchemyError) -> str:
        return _cause(error)


class _File(Database):
    """SQLite, in WAL mode: readers see the last commit while one writes."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        super().__init__()
        self._path, self._read_only = path, read_only
        where = f"file:{quote(str(path))}?mode=ro&uri=true" if read_only else str(path)
        self._engine = sa.create_engine(f"sqlite:///{where}")
        if not read_only:
            sa.event.listen(self._engine, "connect", _on_sqlite_connect)
            sa.event.listen(self._engine, "begin", _on_sqlite_begin)

    def _why(self, error: SQLAlchemyError) -> str:
        """Return why a write failed: a full disk is "full", or an "I/O error" where the log next to the file
        cannot grow.
        """
        cause = _cause(error)
        if "full" in cause or "disk I/O error" in cause:
            return f"{cause}; free space in {self._path.parent}; what runs goes on without a restart"
        return cause

    def is_new(self) -> bool:
        return not self._path.exists()

    def _prepare(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
        except OSError as error:
            raise StateUnavailableError(f"cannot write {self._path}: {error.strerror}; mend the folder") from error

    def _keep(self) -> None:
        """Do nothing: the home's lock admits no other writer."""

    def _transaction(self) -> AbstractContextManager[sa.Connection]:
        return self._engine.begin()


def _on_sqlite_connect(connection: object, _record: object) -> None:
    connection.isolation_level = None  # type: ignore[attr-defined] # transactions begin in _on_sqlite_begin
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_sqlite_begin(connection: sa.Connection) -> None:
    """Python's SQLite module by itself begins no transaction for a CREATE TABLE: a migration that was cut short
    would leave half a schema, which no later one could build on."""
    connection.exec_driver_sql("BEGIN")


class _Server(Database):
    """PostgreSQL. Reads take any connection of a pool; all writes go through the session that holds the lock."""

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            self._engine = sa.create_engine(
                sa.make_url(url).set(drivername="postgresql+psycopg"),
                pool_pre_ping=True,  # the server may have been restarted meanwhile
                pool_size=4,
                max_overflow=4,
                connect_args={
                    "application_name": f"iserve {socket.gethostname()[:40]} pid {os.getpid()}",
                    "client_encoding": "utf8",
                    "connect_timeout": 5,
                    # A server that is cut off without a word: noticed in about ten seconds, on either side.
                    "keepalives_idle": 5,
                    "keepalives_interval": 2,
                    "keepalives_count": 3,
                    "tcp_user_timeout": 10_000,
                },
            )
        except ModuleNotFoundError as error:
            raise ConfigError(
                "ISERVE_DATABASE_URL names PostgreSQL, whose driver is not installed: pip install "
                "'iserve[postgres]'"
            ) from error
        except (ArgumentError, ValueError) as error:
            raise ConfigError(
                "ISERVE_DATABASE_URL cannot be read; it is of the form postgresql://USER@HOST:PORT/DATABASE"
            ) from error
        sa.event.listen(self._engine, "connect", _on_postgres_connect)
        self._session: sa.Connection | None = None

    def is_new(self) -> bool:
        with self.read() as connection:
            return not sa.inspect(connection).has_table("alembic_version")

    def close(self) -> None:
        with self._lock:
            self._drop()
        super().close()

    def _prepare(self) -> None:
        """Take the lock. Raises ConflictError when another controller has it and keeps it."""
        self._take(ConflictError, _OPENING_PATIENCE_S)

    def _keep(self) -> None:
        session = self._session
        if (
            session is not None and not session.invalidated
        ):  # an invalidated one would connect anew, without the lock
            try:
                session.exec_driver_sql("SELECT 1")
                session.rollback()
                return
            except SQLAlchemyError:
                pass
        self._drop()
        self._take(StateUnavailableError, _RETAKING_PATIENCE_S)

    def _take(self, refusal: type[IserveError], patience_s: float) -> None:
        session = self._engine.connect()
        try:
            session.detach()  # never given to a reader: it is closed with the lock
            deadline = time.monotonic() + patience_s
            while not session.scalar(sa.select(sa.func.pg_try_advisory_lock(_LOCK_ID))):
                if time.monotonic() >= deadline:
                    who = session.scalar(_LOCK_HELD_BY, {"id": _LOCK_ID}) or "one that has just ended"
                    raise refusal(
                        f"another controller ({who}) writes to this state database, and only one can; end it, or "
                        "set ISERVE_DATABASE_URL to another database"
                    )
                session.rollback()
                time.sleep(0.1)
            session.commit()
        except BaseException:
            session.close()
            raise
        self._session = session

    def _drop(self) -> None:
        if self._session is not None:
            with suppress(SQLAlchemyError):
                self._session.close()
        self._session = None

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        self._keep()
        session = self._session
        assert session is not None
        with session.begin():
            yield session


def _on_postgres_connect(connection: object, _record: object) -> None:
    """Set one session's options; not the database's, which may serve other programs too."""
    with connection.cursor() as cursor:  # type: ignore[attr-defined]
        # An acknowledged intent is on disk. A server that is set to wait for standbys as well still does.
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') = 'off'"
        )
        # No query here takes seconds. A host that died without a word gives its lock back soon.
        for setting, value in (
            ("statement_timeout", "30s"),
            ("tcp_keepalives_idle", "5"),
            ("tcp_keepalives_interval", "2"),
            ("tcp_keepalives_count", "3"),
        ):
            cursor.execute(f"SET {setting} = '{value}'")
    connection.commit()  # type: ignore[attr-defined]


def _cause(error: SQLAlchemyError) -> str:
    original = getattr(error, "orig", None)
    return str(original or error).splitlines()[0]
