"""Register of variants: rows by name, in one namespace with deployments and registered models.

A variant and a deployment have the same name where the deployment serves that variant's merged checkpoint, whose
folder has the hash of the variant's content as its name.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import PurePath

import sqlalchemy as sa

from fingerprint.errors import ConflictError, NotFoundError
from iserve.demo import DEMO_MODEL_NAME
from iserve.state.database import Database
from iserve.state.rows import VariantRow
from iserve.state.schema import deployments, models, variants

__all__ = ["MAX_VARIANTS", "VariantTable", "check_no_variant"]

MAX_VARIANTS = 10_000


class VariantTable:
    """The table of variants; safe to use from several threads of one process.

    Raises (every method):
        StateUnavailableError: as the store.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def check_free(self, name: str) -> None:
        """Raise ConflictError where a deployment or a model has ``name``, or there are too many other variants."""
        with self._database.read() as connection:
            _check_free(connection, name)
            _check_room(connection, name)

    def put(self, row: VariantRow, *, replace: bool = False) -> tuple[VariantRow, VariantRow | None]:
        """Register ``row``; return the variant as it is now, and the one that had the name before.

        One of the same content and base stays as it is, but for its bytes on disk; what was pinned stays so.

        Args:
            replace: give the name, which may have other content or another base, to ``row``, in one step.

        Raises:
            ConflictError: the name is that of a deployment, a model or, without ``replace``, another variant; or
                it is new and there are too many variants.
        """
        same = variants.c.name == row.name
        with self._database.write() as connection:
            _check_free(connection, row.name, row.content_hash)
            _check_room(connection, row.name)
            found = connection.execute(sa.select(variants).where(same)).mappings().first()
            former = None if found is None else VariantRow(**found)
            if former is not None:
                is_same = (former.content_hash, former.base_directory) == (row.content_hash, row.base_directory)
                if not is_same and not replace:
                    raise ConflictError(
                        f"a variant named {row.name!r} exists already, with other content or another base "
                        f"({former.base}); --replace (replace: true) puts this one in its place"
                    )
                disk_bytes, pinned = row.disk_bytes, row.pinned or former.pinned
                row = dataclasses.replace(former if is_same else row, disk_bytes=disk_bytes, pinned=pinned)
                connection.execute(sa.delete(variants).where(same))
            connection.execute(sa.insert(variants).values(dataclasses.asdict(row)))
        return row, former

    def count(self) -> int:
        with self._database.read() as connection:
            return _count(connection)

    def all(self) -> tuple[VariantRow, ...]:
        """Return all of them in the order of their names."""
        with self._database.read() as connection:
            rows = connection.execute(sa.select(variants).order_by(variants.c.name)).mappings().all()
        return tuple(VariantRow(**row) for row in rows)

    def get(self, name: str) -> VariantRow:
        with self._database.read() as connection:
            row = connection.execute(sa.select(variants).where(variants.c.name == name)).mappings().first()
        if row is None:
            raise NotFoundError(f"no variant is named {name[:80]!r}; `iserve variant ls` lists them")
        return VariantRow(**row)

    def has_content(self, content_hash: str) -> bool:
        """Return whether a variant has this content."""
        with self._database.read() as connection:
            query = sa.select(variants.c.name).where(variants.c.content_hash == content_hash).limit(1)
            return connection.execute(query).first() is not None

    def pin(self, name: str, *, pinned: bool) -> VariantRow:
        """Change whether it is pinned. Raises NotFoundError: there is none of that name."""
        with self._database.write() as connection:
            connection.execute(sa.update(variants).where(variants.c.name == name).values(pinned=pinned))
        return self.get(name)

    def remove(self, name: str) -> VariantRow:
        """Remove a variant and return what it was. Raises NotFoundError: there is none of that name."""
        row = self.get(name)
        with self._database.write() as connection:
            connection.execute(sa.delete(variants).where(variants.c.name == name))
        return row


def check_no_variant(connection: sa.Connection, name: str, instead: str, request: str = "{}") -> None:
    """Raise ConflictError where a variant has ``name``; the message ends with ``instead``.

    Args:
        request: of a deployment as JSON; one of the variant's own merged checkpoint is no conflict.
    """
    content_hash = _content_of(connection, name)
    if content_hash is not None and not _is_of_content(request, content_hash):
        raise ConflictError(
            f"a variant is named {name!r}, and one name means one model: {instead} or remove it first "
            f"(`iserve variant rm {name}`)"
        )


def _content_of(connection: sa.Connection, name: str) -> str | None:
    query = sa.select(variants.c.content_hash).where(variants.c.name == name)
    found: str | None = connection.execute(query).scalar()
    return found


def _is_of_content(request: str, content_hash: str) -> bool:
    """Return whether a deployment's request is for the merged checkpoint of a variant's content."""
    model = json.loads(request).get("model")
    return isinstance(model, str) and PurePath(model).name == content_hash


def _check_room(connection: sa.Connection, name: str) -> None:
    """Raise ConflictError where ``name`` would be one variant too many."""
    if _count(connection, other_than=name) >= MAX_VARIANTS:
        raise ConflictError(f"there are {MAX_VARIANTS} variants already; remove one first")


def _count(connection: sa.Connection, other_than: str = "") -> int:
    query = sa.select(sa.func.count()).select_from(variants).where(variants.c.name != other_than)
    return int(connection.execute(query).scalar_one())


def _check_free(connection: sa.Connection, name: str, content_hash: str | None = None) -> None:
    """Raise ConflictError where a deployment of something else, or a model, has ``name``.

    Args:
        content_hash: of the variant that is to have it; None: of the one that has it, if any has.
    """
    request = connection.execute(sa.select(deployments.c.request).where(deployments.c.name == name)).scalar()
    if request is not None:
        former = _content_of(connection, name)
        if not _is_of_content(request, content_hash or former or ""):
            way_out = (
                "choose another name" if former is None else f"remove both first (`iserve variant rm {name}`)"
            )
            raise ConflictError(f"a deployment is named {name!r}, and one name means one model; {way_out}")
    owner = "the bundled model" if name == DEMO_MODEL_NAME else None
    if connection.execute(sa.select(models.c.name).where(models.c.name == name)).first() is not None:
        owner = "a registered model"
    if owner is not None:
        raise ConflictError(f"{owner} is named {name!r}, and one name means one model; choose another name")
