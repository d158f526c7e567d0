"""Reads and writes of the state, in short transactions behind one lock: SQLite has one writer.

Rows leave as frozen dataclasses and typed values, never as SQLAlchemy rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, ConflictError, NotFoundError, UnavailableError
from fingerprint.measurements import Profile
from fingerprint.verification import Verification
from iserve.routes import ApiKeyRecord
from iserve.state.schema import api_keys, deployments, events, models, profiles, route_version, verifications

__all__ = ["DeploymentRow", "EventRow", "KeyRow", "ModelRow", "Store", "VerificationRow"]

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    name: str
    directory: str
    created_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRow:
    id: int
    name: str
    created_at: float
    request: str
    desired: str
    phase: str
    error: str | None
    plan: str | None
    worker: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    id: int
    at: float
    deployment_id: int | None
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRow:
    key_id: str
    sha256: str
    scope: str
    label: str
    created_at: float
    revoked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationRow:
    model: str
    shape_hash: str
    engine: str
    machine_key: str
    verification: Verification


_EVENTS_KEPT = 10_000


def _on_connect(connection: object, _record: object) -> None:
    connection.isolation_level = None  # type: ignore[attr-defined] # transactions begin in _on_begin
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_begin(connection: sa.Connection) -> None:
    """Python's SQLite module by itself begins no transaction for a CREATE TABLE: a migration that was cut short
    would leave half a schema, which no later one could build on."""
    connection.exec_driver_sql("BEGIN")


class Store:
    """The state behind one URL. Safe to use from several threads of one process.

    Raises (every method):
        UnavailableError: the database cannot be read or written (disk full, locked, damaged).
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._engine = sa.create_engine(url)
        if self._engine.dialect.name == "sqlite" and not read_only:
            sa.event.listen(self._engine, "connect", _on_connect)
            sa.event.listen(self._engine, "begin", _on_begin)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Store:
        """The SQLite store at ``path``, created or migrated to the newest schema.

        Raises:
            UnavailableError: also when a newer iServe has written it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
        except OSError as error:
            raise UnavailableError(f"cannot write {path}: {error.strerror}; mend the folder") from error
        store = cls(f"sqlite:///{path}")
        try:
            store.migrate()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read_only(cls, path: Path) -> Store:
        """The store at ``path`` beside the controller that owns it."""
        return cls(f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true", read_only=True)

    def migrate(self, to: str = "head") -> None:
        """All of it or nothing: a process that is killed in the middle leaves the old schema."""
        config = Config()
        with as_file(files("iserve.state") / "migrations") as scripts, self._write() as connection:
            config.set_main_option("script_location", str(scripts))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, to)
            except CommandError as error:
                raise UnavailableError(
                    f"the state database is of another version of iServe ({error}); use that one, or another "
                    "ISERVE_HOME"
                ) from error

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        try:
            with self._lock, self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise UnavailableError(f"the state database cannot be written: {_cause(error)}") from error

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise UnavailableError(f"the state database cannot be read: {_cause(error)}") from error

    # models

    def put_model(self, name: str, directory: str) -> None:
        """Register ``name``, or move it to another folder."""
        with self._write() as connection:
            connection.execute(sa.delete(models).where(models.c.name == name))
            connection.execute(sa.insert(models).values(name=name, directory=directory, created_at=time.time()))

    def models(self) -> tuple[ModelRow, ...]:
        with self._read() as connection:
            return tuple(ModelRow(**row) for row in connection.execute(sa.select(models)).mappings())

    def remove_model(self, name: str) -> None:
        with self._write() as connection:
            if not connection.execute(sa.delete(models).where(models.c.name == name)).rowcount:
                raise NotFoundError(f"no model named {name!r} is registered")

    # profiles

    def put_profile(self, profile: Profile, machine_key: str) -> None:
        """Keep the newest profile of this shape, engine and machine."""
        key = (
            (profiles.c.shape_hash == profile.spec.shape_hash)
            & (profiles.c.engine == profile.engine)
            & (profiles.c.machine_key == machine_key)
        )
        with self._write() as connection:
            connection.execute(sa.delete(profiles).where(key))
            connection.execute(
                sa.insert(profiles).values(
                    shape_hash=profile.spec.shape_hash,
                    engine=profile.engine,
                    machine_key=machine_key,
                    model=profile.model,
                    created_at=time.time(),
                    body=to_json(profile).decode(),
                )
            )

    def profile(self, shape_hash: str, engine: str, machine_key: str) -> Profile | None:
        query = sa.select(profiles.c.body).where(
            (profiles.c.shape_hash == shape_hash)
            & (profiles.c.engine == engine)
            & (profiles.c.machine_key == machine_key)
        )
        with self._read() as connection:
            body = connection.execute(query).scalar_one_or_none()
        return None if body is None else _readable(body, Profile)

    def profiles(self) -> tuple[Profile, ...]:
        """All of them, newest first."""
        query = sa.select(profiles.c.body).order_by(profiles.c.created_at.desc())
        with self._read() as connection:
            found = [_readable(body, Profile) for body in connection.execute(query).scalars()]
        return tuple(profile for profile in found if profile is not None)

    # verifications

    def put_verification(
        self, verification: Verification, *, model: str, shape_hash: str, engine: str, machine_key: str
    ) -> None:
        """Keep the newest check of this configuration, shape, engine and machine."""
        key = {
            "shape_hash": shape_hash,
            "engine": engine,
            "machine_key": machine_key,
            "config": str(verification.config),
        }
        body = to_json(verification).decode()
        with self._write() as connection:
            connection.execute(sa.delete(verifications).filter_by(**key))
            values = key | {"model": model, "created_at": time.time(), "body": body}
            connection.execute(sa.insert(verifications).values(values))

    def verifications(self, **key: str) -> tuple[VerificationRow, ...]:
        """Those whose ``shape_hash``, ``engine`` and ``machine_key`` are as given, the oldest first."""
        query = sa.select(verifications).filter_by(**key).order_by(verifications.c.created_at)
        with self._read() as connection:
            rows = connection.execute(query).mappings().all()
        read = ((row, _readable(row["body"], Verification)) for row in rows)
        return tuple(
            VerificationRow(
                model=row["model"],
                shape_hash=row["shape_hash"],
                engine=row["engine"],
                machine_key=row["machine_key"],
                verification=verification,
            )
            for row, verification in read
            if verification is not None
        )

    def forget_verifications(self, shape_hash: str) -> int:
        """How many there were, on every engine and machine."""
        with self._write() as connection:
            return connection.execute(sa.delete(verifications).filter_by(shape_hash=shape_hash)).rowcount

    # deployments

    def add_deployment(self, name: str, request: bytes) -> DeploymentRow:
        """Accept a deployment: from here on it survives the controller.

        Raises:
            ConflictError: the name is in use.
        """
        try:
            with self._write() as connection:
                connection.execute(
                    sa.insert(deployments).values(
                        name=name,
                        created_at=time.time(),
                        request=request.decode(),
                        desired="running",
                        phase="accepted",
                    )
                )
        except IntegrityError as error:
            raise ConflictError(
                f"a deployment named {name!r} exists already; choose another --name or remove it first"
            ) from error
        return self.deployment(name)

    def deployments(self) -> tuple[DeploymentRow, ...]:
        with self._read() as connection:
            rows = connection.execute(sa.select(deployments).order_by(deployments.c.id)).mappings()
            return tuple(DeploymentRow(**row) for row in rows)

    def deployment(self, name: str) -> DeploymentRow:
        with self._read() as connection:
            row = connection.execute(sa.select(deployments).where(deployments.c.name == name)).mappings().first()
        if row is None:
            raise NotFoundError(f"no deployment is named {name!r}")
        return DeploymentRow(**row)

    def deployment_by_id(self, deployment_id: int) -> DeploymentRow | None:
        """None when it has been deleted."""
        with self._read() as connection:
            query = sa.select(deployments).where(deployments.c.id == deployment_id)
            row = connection.execute(query).mappings().first()
        return None if row is None else DeploymentRow(**row)

    def update_deployment(
        self,
        deployment_id: int,
        *,
        phase: str | None = None,
        desired: str | None = None,
        error: str | None = None,
        plan: bytes | None = None,
        worker: bytes | None = None,
    ) -> None:
        """Change what is given. A new phase without an error clears the error."""
        values: dict[str, object] = {}
        if phase is not None:
            values |= {"phase": phase, "error": error}
        if desired is not None:
            values["desired"] = desired
        if plan is not None:
            values["plan"] = plan.decode()
        if worker is not None:
            values["worker"] = worker.decode()
        with self._write() as connection:
            connection.execute(sa.update(deployments).where(deployments.c.id == deployment_id).values(**values))

    def delete_deployment(self, deployment_id: int) -> None:
        with self._write() as connection:
            connection.execute(sa.delete(deployments).where(deployments.c.id == deployment_id))

    # events

    def add_event(self, deployment_id: int | None, kind: str, message: str) -> None:
        """Append to the log of what happened; the oldest beyond 10,000 go.

        Of a deployment that has been deleted meanwhile it is kept all the same, as nobody's.
        """
        there = sa.select(deployments.c.id).where(deployments.c.id == deployment_id).scalar_subquery()
        with self._write() as connection:
            result = connection.execute(
                sa.insert(events).values(at=time.time(), deployment_id=there, kind=kind, message=message[:4000])
            )
            (newest,) = result.inserted_primary_key or (0,)
            connection.execute(sa.delete(events).where(events.c.id <= newest - _EVENTS_KEPT))

    def events(
        self, *, after: int = 0, deployment_id: int | None = None, limit: int = 500
    ) -> tuple[EventRow, ...]:
        query = sa.select(events).where(events.c.id > after).order_by(events.c.id).limit(limit)
        if deployment_id is not None:
            query = query.where(events.c.deployment_id == deployment_id)
        with self._read() as connection:
            return tuple(EventRow(**row) for row in connection.execute(query).mappings())

    # API keys

    def add_key(self, record: ApiKeyRecord, label: str) -> None:
        with self._write() as connection:
            connection.execute(
                sa.insert(api_keys).values(
                    key_id=record.key_id,
                    sha256=record.sha256,
                    scope=record.scope,
                    label=label,
                    created_at=time.time(),
                    revoked=False,
                )
            )

    def api_keys(self) -> tuple[KeyRow, ...]:
        with self._read() as connection:
            return tuple(KeyRow(**row) for row in connection.execute(sa.select(api_keys)).mappings())

    def revoke_key(self, key_id: str) -> None:
        with self._write() as connection:
            done = connection.execute(sa.update(api_keys).where(api_keys.c.key_id == key_id).values(revoked=True))
            if not done.rowcount:
                raise NotFoundError(f"no API key has the id {key_id!r}")

    # routes

    def next_route_version(self) -> int:
        """A number larger than any given out before, across restarts."""
        with self._write() as connection:
            current = connection.execute(sa.select(route_version.c.version)).scalar_one_or_none()
            if current is None:
                connection.execute(sa.insert(route_version).values(one=1, version=1))
                return 1
            connection.execute(sa.update(route_version).values(version=current + 1))
            return int(current) + 1


def _readable(body: str, kind: type[T]) -> T | None:
    """None for what an iServe of another version wrote in its own way: it is measured anew."""
    try:
        return from_json(body, kind, what=f"a stored {kind.__name__.lower()}")
    except BadInputError as error:
        log.warning("%s; it counts as absent", error)
        return None


def _cause(error: SQLAlchemyError) -> str:
    original = getattr(error, "orig", None)
    return str(original or error).splitlines()[0]
