"""Reads and writes of the state, each write one short transaction.

Rows leave as frozen dataclasses and typed values, never as SQLAlchemy rows.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, ConflictError, NotFoundError
from fingerprint.measurements import Profile
from fingerprint.verification import Verification
from iserve.merged_keys import model_of
from iserve.route_table import ApiKeyRecord
from iserve.state.database import Database, open_database
from iserve.state.quality_table import QualityTable
from iserve.state.rows import DeploymentRow, EventRow, KeptAnswer, KeyRow, ModelRow, VariantRow, VerificationRow
from iserve.state.schema import (
    api_keys,
    deployments,
    events,
    idempotency_keys,
    models,
    profiles,
    route_version,
    verifications,
)
from iserve.state.variant_table import VariantTable, check_no_variant

__all__ = [
    "DeploymentRow",
    "EventRow",
    "KeptAnswer",
    "KeyRow",
    "ModelRow",
    "Store",
    "VariantRow",
    "VerificationRow",
]

T = TypeVar("T")

log = logging.getLogger(__name__)


_EVENTS_KEPT = 10_000


class Store:
    """The state at one place. Safe to use from several threads of one process.

    Attributes:
        variants: the register of LoRA variants.
        quality: results of ``iserve quality``.

    Raises (every method):
        StateUnavailableError: the database cannot be read or written (away, disk full, locked, damaged).
    """

    def __init__(self, database: Database, merged_folder: Path | None = None) -> None:
        self._database, self._merged = database, merged_folder
        self._write, self._read = database.write, database.read
        self.variants, self.quality = VariantTable(database, merged_folder), QualityTable(database)

    @classmethod
    def open(cls, where: Path | str, *, merged_folder: Path | None = None) -> Store:
        """Return the store at a path (SQLite) or URL (PostgreSQL), created or migrated to the newest schema.

        Args:
            merged_folder: of the merged checkpoints of variants; None: no deployment serves one.

        Raises:
            ConfigError: not such a URL, or PostgreSQL's driver is not installed.
            ConflictError: another controller runs on this database.
            StateUnavailableError: also when a newer iServe has written it.
        """
        store = cls(open_database(where), merged_folder)
        try:
            store.migrate()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read_only(cls, where: Path | str, *, merged_folder: Path | None = None) -> Store:
        """Return the store there, for a reader next to the controller that owns it.

        Raises ConfigError as :meth:`open`.
        """
        return cls(open_database(where, read_only=True), merged_folder)

    def migrate(self, to: str = "head") -> None:
        self._database.migrate(to)

    def hold(self) -> None:
        """See that this controller is still the only one here: as ``Database.hold``."""
        self._database.hold()

    def is_new(self) -> bool:
        """Return whether no iServe has ever kept anything here."""
        return self._database.is_new()

    def close(self) -> None:
        self._database.close()

    # models

    def put_model(self, name: str, directory: str) -> None:
        """Register ``name``, or move it to another folder. Raises ConflictError: a variant has the name."""
        with self._write() as connection:
            check_no_variant(connection, name, "choose another name")
            connection.execute(sa.delete(models).where(models.c.name == name))
            connection.execute(sa.insert(models).values(name=name, directory=directory, created_at=time.time()))

    def models(self) -> tuple[ModelRow, ...]:
        return self._rows(ModelRow, sa.select(models))

    def remove_model(self, name: str) -> None:
        if not self._changed(sa.delete(models).where(models.c.name == name)):
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
        """Return all of them, newest first."""
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
        """Return those whose ``shape_hash``, ``engine`` and ``machine_key`` are as given, the oldest first."""
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
        """Remove the verifications of a shape, on every engine and machine, and return how many there were."""
        return self._changed(sa.delete(verifications).filter_by(shape_hash=shape_hash))

    # deployments

    def add_deployment(
        self,
        name: str,
        request: bytes,
        *,
        created_at: float | None = None,
        message: str | None = None,
        kept: KeptAnswer | None = None,
        forget_before: float = 0.0,
    ) -> DeploymentRow:
        """Accept a deployment: from here on it survives the controller.

        Args:
            created_at: now, unless the answer in ``kept`` says when.
            message: of the event that tells so.
            kept: stored with it, or not at all; those that were made before ``forget_before`` are deleted.

        Raises:
            ConflictError: the name is in use, also by a variant, or the key of ``kept``.
        """
        values = {
            "name": name,
            "created_at": time.time() if created_at is None else created_at,
            "request": request.decode(),
            "desired": "running",
            "phase": "accepted",
        }
        try:
            with self._write() as connection:
                check_no_variant(connection, name, "choose another --name", request.decode(), self._merged)
                if kept is not None:
                    old = idempotency_keys.c.created_at < forget_before
                    connection.execute(sa.delete(idempotency_keys).where(old))
                    connection.execute(sa.insert(idempotency_keys).values(asdict(kept)))
                insert = sa.insert(deployments).values(values).returning(deployments)
                row = DeploymentRow(**connection.execute(insert).mappings().one())
                if message is not None:
                    _add_event(connection, row.id, "accepted", message)
        except IntegrityError as error:
            raise ConflictError(
                f"a deployment named {name!r} exists already; choose another --name or remove it first"
            ) from error
        return row

    def kept_answer(self, key: str, *, made_after: float) -> KeptAnswer | None:
        """Return the answer to the request with ``key``."""
        query = sa.select(idempotency_keys).where(
            (idempotency_keys.c.key == key) & (idempotency_keys.c.created_at >= made_after)
        )
        return self._row(KeptAnswer, query)

    def deployments(self) -> tuple[DeploymentRow, ...]:
        return self._rows(DeploymentRow, sa.select(deployments).order_by(deployments.c.id))

    def deployment(self, name: str) -> DeploymentRow:
        row = self._row(DeploymentRow, sa.select(deployments).where(deployments.c.name == name))
        if row is None:
            raise NotFoundError(f"no deployment is named {name!r}")
        return row

    def deployment_by_id(self, deployment_id: int) -> DeploymentRow | None:
        """Return a deployment; None when it has been deleted."""
        query = sa.select(deployments).where(deployments.c.id == deployment_id)
        return self._row(DeploymentRow, query)

    def update_deployment(
        self,
        deployment_id: int,
        *,
        phase: str | None = None,
        desired: str | None = None,
        error: str | None = None,
        plan: bytes | None = None,
        workers: bytes | None = None,
        as_read: DeploymentRow | None = None,
        unless_updating: bool = False,
    ) -> bool:
        """Change what is given. A new phase without an error clears the error. False: it is gone, its phase or
        its workers are no longer those of ``as_read``, or it is being updated."""
        same = deployments.c.id == deployment_id
        if unless_updating:
            same &= deployments.c.update_request.is_(None)
        if as_read is not None:
            same &= deployments.c.phase == as_read.phase
            same &= deployments.c.workers.is_not_distinct_from(as_read.workers)
        values: dict[str, object] = {}
        if phase is not None:
            values |= {"phase": phase, "error": None if error is None else _storable(error)}
        if desired is not None:
            values["desired"] = desired
        if plan is not None:
            values["plan"] = plan.decode()
        if workers is not None:
            values["workers"] = workers.decode()
        return self._changed(sa.update(deployments).where(same).values(**values)) > 0

    def begin_update(
        self, deployment_id: int, request: bytes, message: str, *, former: str, stop_first: bool = False
    ) -> bool:
        """Accept an update of a deployment: from here on it survives the controller. False: not while it is not
        ready, or while another is under way; nor where what was asked for is no longer ``former``.

        Raises:
            ConflictError: it serves the variant of its name, and another model is asked for.
        """
        idle = (
            (deployments.c.id == deployment_id)
            & (deployments.c.desired == "running")
            & (deployments.c.phase == "ready")
            & (deployments.c.request == former)
            & deployments.c.update_request.is_(None)
        )
        with self._write() as connection:
            name = connection.execute(sa.select(deployments.c.name).where(idle)).scalar()
            if name is not None and model_of(request.decode()) != model_of(former):
                instead = "update it without another model"
                check_no_variant(connection, name, instead, request.decode(), self._merged)
            values = {"update_request": request.decode(), "update_stop_first": stop_first, "error": None}
            begun = connection.execute(sa.update(deployments).where(idle).values(**values)).rowcount > 0
            if begun:
                _add_event(connection, deployment_id, "updating", message)
        return begun

    def record_update(
        self, deployment_id: int, *, plan: bytes, workers: bytes, phase: str | None = None, message: str = ""
    ) -> None:
        """Keep what an update is about to launch, with the ``phase`` and its event if one is given."""
        values = {"update_plan": plan.decode(), "update_workers": workers.decode()}
        with self._write() as connection:
            update = sa.update(deployments).where(deployments.c.id == deployment_id).values(**values)
            connection.execute(update if phase is None else update.values(phase=phase))
            if phase is not None:
                _add_event(connection, deployment_id, phase, message)

    def move_update(
        self, deployment_id: int, former: str, phase: str, message: str, *, error: str | None = None
    ) -> None:
        """Take an update that is in the phase ``former`` to ``phase``; nothing where it is no longer there."""
        there = (
            (deployments.c.id == deployment_id)
            & (deployments.c.phase == former)
            & deployments.c.update_request.is_not(None)
        )
        values = {"phase": phase, "error": None if error is None else _storable(error)}
        with self._write() as connection:
            if connection.execute(sa.update(deployments).where(there).values(**values)).rowcount:
                _add_event(connection, deployment_id, phase, message)

    def finish_update(self, deployment_id: int, *, former: str | None, workers: bytes, message: str) -> bool:
        """Have ``workers``, of the update, serve in place of the ``former`` ones, which drain from now on. False:
        these are not the deployment's workers any more, and nothing is changed."""
        same = deployments.c.id == deployment_id
        unchanged = deployments.c.workers.is_not_distinct_from(former)
        with self._write() as connection:
            row = connection.execute(sa.select(deployments).where(same)).mappings().first()
            if row is None or row["update_request"] is None:
                return False
            draining = [json.loads(json_text or "[]") for json_text in (row["draining"], former)]
            values = {
                "request": row["update_request"],
                "plan": row["update_plan"],
                "workers": workers.decode(),
                "draining": json.dumps([*draining[0], *draining[1]]),
                "phase": "ready",  # also where the former ones are being started again, or could not be
                "error": None,
            }
            change = sa.update(deployments).where(same & unchanged).values(**values | _NO_UPDATE)
            if finished := connection.execute(change).rowcount > 0:
                _add_event(connection, deployment_id, "ready", message)
        return finished

    def drop_update(
        self, deployment_id: int, error: str, *, phase: str | None = None, workers: bytes | None = None
    ) -> None:
        """Give an update up: all is as before it but ``phase`` and ``workers``, and ``error`` says why; one that
        has failed keeps its own."""
        has_failed = deployments.c.phase.in_(("failed", "refused"))
        values: dict[str, object] = {"error": sa.case((has_failed, deployments.c.error), else_=_storable(error))}
        values |= _NO_UPDATE
        if phase is not None:
            values["phase"] = phase
        if workers is not None:
            values["workers"] = workers.decode()
        with self._write() as connection:
            connection.execute(sa.update(deployments).where(deployments.c.id == deployment_id).values(**values))
            _add_event(connection, deployment_id, "update-failed", error)

    def forget_drained(self, deployment_id: int, draining: str) -> None:
        """Forget the workers of ``draining``, which are gone."""
        same = (deployments.c.id == deployment_id) & (deployments.c.draining == draining)
        self._changed(sa.update(deployments).where(same).values(draining=None))

    def delete_deployment(self, deployment_id: int) -> None:
        self._changed(sa.delete(deployments).where(deployments.c.id == deployment_id))

    # events

    def add_event(self, deployment_id: int | None, kind: str, message: str) -> None:
        """Append to the log of what happened; the oldest beyond 10,000 go.

        An event of a deployment that has been deleted meanwhile is kept all the same, without an owner.
        """
        with self._write() as connection:
            _add_event(connection, deployment_id, kind, message)

    def events(
        self, *, after: int = 0, deployment_id: int | None = None, limit: int = 500
    ) -> tuple[EventRow, ...]:
        query = sa.select(events).where(events.c.id > after).order_by(events.c.id).limit(limit)
        if deployment_id is not None:
            query = query.where(events.c.deployment_id == deployment_id)
        return self._rows(EventRow, query)

    # API keys

    def add_key(self, record: ApiKeyRecord, label: str) -> None:
        values = asdict(record) | {"label": label, "created_at": time.time(), "revoked": False}
        self._changed(sa.insert(api_keys).values(values))

    def api_keys(self) -> tuple[KeyRow, ...]:
        return self._rows(KeyRow, sa.select(api_keys))

    def revoke_key(self, key_id: str) -> None:
        if not self._changed(sa.update(api_keys).where(api_keys.c.key_id == key_id).values(revoked=True)):
            raise NotFoundError(f"no API key has the id {key_id!r}")

    # routes

    def next_route_version(self) -> int:
        """Return a number larger than any given out before, across restarts."""
        with self._write() as connection:
            current = connection.execute(sa.select(route_version.c.version)).scalar_one_or_none()
            if current is None:
                connection.execute(sa.insert(route_version).values(one=1, version=1))
                return 1
            connection.execute(sa.update(route_version).values(version=current + 1))
            return int(current) + 1

    def _rows(self, kind: type[T], query: sa.Select[Any]) -> tuple[T, ...]:
        with self._read() as connection:
            return tuple(kind(**row) for row in connection.execute(query).mappings())

    def _row(self, kind: type[T], query: sa.Select[Any]) -> T | None:
        return next(iter(self._rows(kind, query)), None)

    def _changed(self, statement: sa.UpdateBase) -> int:
        """Execute it as a transaction of its own; return the number of rows that it changed."""
        with self._write() as connection:
            return connection.execute(statement).rowcount


_NO_UPDATE: dict[str, None] = dict.fromkeys(
    ("update_request", "update_plan", "update_workers", "update_stop_first")
)


def _add_event(connection: sa.Connection, deployment_id: int | None, kind: str, message: str) -> None:
    there = sa.select(deployments.c.id).where(deployments.c.id == deployment_id).scalar_subquery()
    text = _storable(message[:4000])
    result = connection.execute(
        sa.insert(events).values(at=time.time(), deployment_id=there, kind=kind, message=text)
    )
    (newest,) = result.inserted_primary_key or (0,)
    connection.execute(sa.delete(events).where(events.c.id <= newest - _EVENTS_KEPT))


def _storable(message: str) -> str:
    """Escape what a log or a file's name may hold: PostgreSQL keeps no zero byte, and no database half a
    character.
    """
    return message.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _readable(body: str, kind: type[T]) -> T | None:
    """Return the value; None for what an iServe of another version wrote in its own way: it is measured anew."""
    try:
        return from_json(body, kind, what=f"a stored {kind.__name__.lower()}")
    except BadInputError as error:
        log.warning("%s; it counts as absent", error)
        return None
