"""A new state of each kind of database, and the store that is opened there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iserve.state.store import Store
from tests.iserve.state.raw_sql import Where


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def where(request: pytest.FixtureRequest, path: Path) -> Where:
    """A new state of each kind."""
    if request.param == "sqlite":
        return path
    url = request.getfixturevalue("postgres").make_database()
    assert isinstance(url, str)
    return url


@pytest.fixture
def at(where: Where) -> Iterator[Callable[[], Store]]:
    """``at()``: the store there; the one that was opened before is closed, as one controller follows another."""
    opened: list[Store] = []

    def reopen() -> Store:
        while opened:
            opened.pop().close()
        opened.append(Store.open(where))
        return opened[-1]

    yield reopen
    while opened:
        opened.pop().close()
