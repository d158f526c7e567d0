"""The table of results of ``iserve quality``."""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa

from iserve.state.database import Database
from iserve.state.rows import QualityRow
from iserve.state.schema import quality_results

__all__ = ["MAX_OF_CONTENT", "MAX_RESULTS", "QualityTable"]

MAX_RESULTS = 1_000  # beyond which the oldest are dropped
MAX_OF_CONTENT = 32  # likewise of one content, so that results of one never push out those of the rest


class QualityTable:
    """The table of results; safe to use from several threads of one process.

    Raises (every method):
        StateUnavailableError: as the store.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, row: QualityRow) -> None:
        """Keep ``row`` in place of one of the same identity; of its content and in all the newest are kept."""
        columns = quality_results.c
        with self._database.write() as connection:
            connection.execute(sa.delete(quality_results).where(columns.identity == row.identity))
            connection.execute(sa.insert(quality_results).values(dataclasses.asdict(row)))
            newest = sa.select(columns.identity).order_by(columns.measured_at.desc(), columns.identity)
            same = newest.where(_of_content(row.variant_hash, row.weights_stamp))
            for query, most in ((same, MAX_OF_CONTENT), (newest, MAX_RESULTS)):
                kept = connection.execute(query.limit(most + 100)).scalars().all()
                if len(kept) > most:
                    connection.execute(sa.delete(quality_results).where(columns.identity.in_(kept[most:])))

    def of_content(self, variant_hash: str, weights_stamp: str, most: int) -> tuple[QualityRow, ...]:
        """Return the newest results of these contents, at most ``most``, the newest first."""
        return self._newest(sa.select(quality_results).where(_of_content(variant_hash, weights_stamp)), most)

    def all(self, most: int) -> tuple[QualityRow, ...]:
        """Return the newest results, at most ``most``, the newest first."""
        return self._newest(sa.select(quality_results), most)

    def _newest(self, query: sa.Select[tuple[object, ...]], most: int) -> tuple[QualityRow, ...]:
        columns = quality_results.c
        ordered = query.order_by(columns.measured_at.desc(), columns.identity).limit(most)
        with self._database.read() as connection:
            rows = connection.execute(ordered).mappings().all()
        return tuple(QualityRow(**row) for row in rows)


def _of_content(variant_hash: str, weights_stamp: str) -> sa.ColumnElement[bool]:
    columns = quality_results.c
    return sa.and_(columns.variant_hash == variant_hash, columns.weights_stamp == weights_stamp)
