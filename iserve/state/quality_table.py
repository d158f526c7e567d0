"""The table of results of ``iserve quality``."""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa

from iserve.state.database import Database
from iserve.state.rows import QualityRow
from iserve.state.schema import quality_results

__all__ = ["MAX_RESULTS", "QualityTable"]

MAX_RESULTS = 1_000  # beyond which the oldest are dropped


class QualityTable:
    """The table of results; safe to use from several threads of one process.

    Raises (every method):
        StateUnavailableError: as the store.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, row: QualityRow) -> None:
        """Keep ``row`` in place of one of the same identity, and the newest ``MAX_RESULTS`` in all."""
        columns = quality_results.c
        with self._database.write() as connection:
            connection.execute(sa.delete(quality_results).where(columns.identity == row.identity))
            connection.execute(sa.insert(quality_results).values(dataclasses.asdict(row)))
            newest = sa.select(columns.identity).order_by(columns.measured_at.desc(), columns.identity)
            kept = connection.execute(newest.limit(MAX_RESULTS + 100)).scalars().all()
            if len(kept) > MAX_RESULTS:
                connection.execute(sa.delete(quality_results).where(columns.identity.in_(kept[MAX_RESULTS:])))

    def of_content(self, variant_hash: str, weights_stamp: str, most: int) -> tuple[QualityRow, ...]:
        """Return the newest results of these contents, at most ``most``, the newest first."""
        columns = quality_results.c
        same = sa.and_(columns.variant_hash == variant_hash, columns.weights_stamp == weights_stamp)
        return self._newest(sa.select(quality_results).where(same), most)

    def all(self, most: int) -> tuple[QualityRow, ...]:
        """Return the newest results, at most ``most``, the newest first."""
        return self._newest(sa.select(quality_results), most)

    def _newest(self, query: sa.Select[tuple[object, ...]], most: int) -> tuple[QualityRow, ...]:
        columns = quality_results.c
        ordered = query.order_by(columns.measured_at.desc(), columns.identity).limit(most)
        with self._database.read() as connection:
            rows = connection.execute(ordered).mappings().all()
        return tuple(QualityRow(**row) for row in rows)
