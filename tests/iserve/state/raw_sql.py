"""Statements on a state's database, without the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

from alembic.command import downgrade
from alembic.config import Config
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


def migrated_back(where: Where, to: str) -> None:
    """Lead the state back to revision ``to``, as an earlier iServe left it."""
    with as_file(files("iserve.state") / "migrations") as scripts, connected(where) as connection:
        config = Config()
        config.set_main_option("script_location", str(scripts))
        config.attributes["connection"] = connection
        downgrade(config, to)
