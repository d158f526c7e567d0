"""Register of variants: rows by name, in one namespace with deployments and registered models.

A variant and a deployment have the same name where the deployment serves that variant's merged checkpoint, which
is in the home's folder for these and named by the variant's content and base (:mod:`iserve.merged_keys`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import sqlalchemy as sa

from fingerprint.errors import ConflictError, NotFoundError
from iserve.demo import DEMO_MODEL_NAME
from iserve.merged_keys import is_merged, is_merged_of, merged_keys, model_of
from iserve.state.database import Database
from iserve.state.rows import VariantRow
from iserve.state.schema import deployments, models, variants

__all__ = ["MAX_VARIANTS", "VariantTable", "check_no_variant"]

MAX_VARIANTS = 10_000


class VariantTable:
    """The table of variants; safe to use from several threads of one process.

    Args:
        merged_folder: of merged checkpoints; None: no deployment serves one.

    Raises (every method):
        StateUnavailableError: as the store.
    """

    def __init__(self, database: Database, merged_folder: Path | None = None) -> None:
        self._database, self._merged = database, merged_folder

    def check_free(self, name: str) -> None:
        """Raise ConflictError where a deployment or a model has ``name``, or there are too many other variants."""
        with self._database.read() as connection:
            self._check_free(connection, name, _row_of(connection, name))
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
            self._check_free(connection, row.name, row)
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
            raise _none_named(name)
        return VariantRow(**row)

    def base_of(self, name: str) -> str | None:
        """Return the base of a variant, as it was named; None: there is none of that name."""
        with self._database.read() as connection:
            row = _row_of(connection, name)
        return None if row is None else row.base

    def merged_in(self, directory: Path) -> VariantRow | None:
        """Return the first variant, by name, whose merged checkpoint ``directory`` is; None: of none."""
        if self._merged is None or os.path.realpath(directory.parent) != os.path.realpath(self._merged):
            return None
        rows = self.all()
        keys = merged_keys((row.content_hash, row.base_directory) for row in rows)
        return next((row for row, key in zip(rows, keys, strict=True) if key == directory.name), None)

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

    def remove(self, name: str) -> tuple[VariantRow, int | None]:
        """Remove a variant, and ask for the end of its own deployment, in one step.

        Returns:
            What it was, and the id of that deployment; None: it has none.

        Raises:
            NotFoundError: there is none of that name.
        """
        with self._database.write() as connection:
            row = _row_of(connection, name)
            if row is None:
                raise _none_named(name)
            own: int | None = connection.execute(
                sa.select(deployments.c.id).where(deployments.c.name == name)
            ).scalar()
            connection.execute(sa.update(deployments).where(deployments.c.id == own).values(desired="removed"))
            connection.execute(sa.delete(variants).where(variants.c.name == name))
        return row, own

    def _check_free(self, connection: sa.Connection, name: str, row: VariantRow | None) -> None:
        """Raise ConflictError where a deployment of something else, or a model, has ``name``.

        Args:
            row: of the variant that has it, or is to have it.
        """
        request = connection.execute(sa.select(deployments.c.request).where(deployments.c.name == name)).scalar()
        if request is not None and (row is None or not _is_of(request, self._merged, row)):
            way_out = "choose another name"
            if _row_of(connection, name) is not None:
                way_out = f"remove both first (`iserve variant rm {name}`)"
            raise ConflictError(f"a deployment is named {name!r}, and one name means one model; {way_out}")
        owner = "the bundled model" if name == DEMO_MODEL_NAME else None
        if connection.execute(sa.select(models.c.name).where(models.c.name == name)).first() is not None:
            owner = "a registered model"
        if owner is not None:
            raise ConflictError(f"{owner} is named {name!r}, and one name means one model; choose another name")


def check_no_variant(
    connection: sa.Connection, name: str, instead: str, request: str = "{}", merged_folder: Path | None = None
) -> None:
    """Raise ConflictError where a variant has ``name``; the message ends with ``instead``.

    Args:
        request: of a deployment as JSON; one of the variant's own merged checkpoint is no conflict, and one of any
            else is.
    """
    row = _row_of(connection, name)
    if is_merged(request, merged_folder) and (row is None or not _is_of(request, merged_folder, row)):
        raise ConflictError(
            f"{model_of(request)} is not the merge of a variant that is named {name!r}: it was removed or "
            f"replaced meanwhile, or its base was changed; `iserve variant deploy {name}` merges "
            "the one that is registered"
        )
    if row is not None and not _is_of(request, merged_folder, row):
        raise ConflictError(
            f"a variant is named {name!r}, and one name means one model: {instead} or remove it first "
            f"(`iserve variant rm {name}`)"
        )


def _none_named(name: str) -> NotFoundError:
    return NotFoundError(f"no variant is named {name[:80]!r}; `iserve variant ls` lists them")


def _row_of(connection: sa.Connection, name: str) -> VariantRow | None:
    row = connection.execute(sa.select(variants).where(variants.c.name == name)).mappings().first()
    return None if row is None else VariantRow(**row)


def _is_of(request: str, merged_folder: Path | None, row: VariantRow) -> bool:
    """Return whether a deployment's request is for the merged checkpoint of a variant."""
    return is_merged_of(request, merged_folder, row.content_hash, row.base_directory)


def _check_room(connection: sa.Connection, name: str) -> None:
    """Raise ConflictError where ``name`` would be one variant too many."""
    if _count(connection, other_than=name) >= MAX_VARIANTS:
        raise ConflictError(f"there are {MAX_VARIANTS} variants already; remove one first")


def _count(connection: sa.Connection, other_than: str = "") -> int:
    query = sa.select(sa.func.count()).select_from(variants).where(variants.c.name != other_than)
    return int(connection.execute(query).scalar_one())
