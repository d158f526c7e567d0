"""Statements on a state's database, without the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, create_engine

Where = Path | str


@contextmanager
def connected(where: Where) -> Iterator[Connection]:
    """Yield a connection that the store knows nothing of."""
    url = f"sqlite:///{where}" if isinstance(where, Path) else where.replace("postgresql:", "postgresql+psycopg:")
    engine = create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def execute(where: Where, statement: str) -> None:
    with connected(where) as connection:
        connection.exec_driver_sql(statement)
