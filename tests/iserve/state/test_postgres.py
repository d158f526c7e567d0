"""The state in PostgreSQL alone: the server is elsewhere, ends and returns, and other programs can reach it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

import pytest
from sqlalchemy import make_url

from fingerprint.errors import (
    ConfigError,
    ConflictError,
    StateUnavailableError,
)
from iserve.state.database import open_database
from iserve.state.store import Store
from tests.golden_words import Golden
from tests.iserve.postgres_server import PostgresServer


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.make_database()


@pytest.fixture
def cut(postgres: PostgresServer, url: str) -> Callable[[], None]:
    """End every session of the database, as a restart of the server does."""

    def end() -> None:
        name = make_url(url).database
        postgres.query(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")

    return end


def test_a_second_controller_on_one_database_is_refused(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr("iserve.state.database._OPENING_PATIENCE_S", 0.2)
    first = Store.open(url)
    with golden.raises("controller", ConflictError):
        Store.open(url)
    first.add_deployment("a", b"{}")
    beside = Store.read_only(url)  # as the command line looks
    assert [d.name for d in beside.deployments()] == ["a"]
    beside.close()
    first.close()
    assert postgres.sessions(url) == []
    second = Store.open(url)
    assert [d.name for d in second.deployments()] == ["a"]
    second.close()


def test_a_second_controller_waits_for_one_that_is_just_ending(url: str) -> None:
    """The next one after a kill: the server has yet to see that the first is gone."""
    first = Store.open(url)
    opened: list[Store] = []
    second = threading.Thread(target=lambda: opened.append(Store.open(url)))
    second.start()
    first.add_deployment("a", b"{}")
    first.close()
    second.join()
    assert [d.name for d in opened[0].deployments()] == ["a"]
    opened[0].close()


def test_two_that_open_a_new_database_at_once_migrate_it_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iserve.state.database._OPENING_PATIENCE_S", 0.2)
    outcomes: list[Store | Exception] = []
    barrier = threading.Barrier(4)

    def open_it() -> None:
        barrier.wait()
        try:
            outcomes.append(Store.open(url))
        except ConflictError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (found for found in outcomes if isinstance(found, Store))
    assert winner.add_deployment("a", b"{}").id == 1
    winner.close()


def test_a_session_that_is_cut_off_is_taken_up_again(url: str, cut: Callable[[], None]) -> None:
    store = Store.open(url)
    store.add_deployment("a", b"{}")
    cut()
    store.add_deployment("b", b"{}")
    cut()
    store.hold()
    cut()
    assert [d.name for d in store.deployments()] == ["a", "b"]
    store.close()


def test_one_that_was_cut_off_and_came_too_late_writes_nothing(
    url: str, cut: Callable[[], None], golden: Golden
) -> None:
    """Else two controllers, on two machines, would both run what the database says."""
    first = Store.open(url)
    cut()
    second = Store.open(url)
    for write in (first.hold, lambda: first.add_deployment("a", b"{}")):
        with golden.raises("controller", StateUnavailableError):
            write()
    assert first.deployments() == second.deployments() == ()
    second.close()
    first.hold()  # it may again
    assert first.add_deployment("a", b"{}").name == "a"
    first.close()


def test_a_session_that_ends_in_the_middle_of_a_write_keeps_nothing_of_it(
    url: str, cut: Callable[[], None]
) -> None:
    database = open_database(url)
    database.migrate()
    insert = "INSERT INTO models VALUES ('{}', '/', 1.5)"

    def write() -> None:
        with database.write() as connection:
            connection.exec_driver_sql(insert.format("lost"))
            cut()
            connection.exec_driver_sql(insert.format("never"))

    with pytest.raises(StateUnavailableError, match="cannot be written"):
        write()
    with database.write() as connection:
        connection.exec_driver_sql(insert.format("kept"))
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT name FROM models").scalars().all() == ["kept"]
    database.close()


def test_a_server_that_is_away_is_one_clear_error_and_nothing_is_lost_when_it_is_back(
    url: str, postgres: PostgresServer, golden: Golden
) -> None:
    store = Store.open(url)
    store.add_deployment("a", b"{}")
    postgres.stop(signal.SIGQUIT)  # as a crash
    try:
        for ask in (store.hold, store.deployments, lambda: store.add_deployment("b", b"{}")):
            with golden.raises("controller", StateUnavailableError):
                ask()
        with pytest.raises(StateUnavailableError):
            Store.open(url)
    finally:
        postgres.start()
    assert [d.name for d in store.deployments()] == ["a"]
    store.add_deployment("b", b"{}")
    store.close()


@pytest.mark.parametrize("wrong", ["postgresql://h:port/d", "no url"])
def test_a_url_that_cannot_be_read_is_one_clear_error(wrong: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://USER@HOST:PORT/DATABASE"):
        Store.open(wrong)


def test_without_its_driver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'iserve\[postgres\]'"):
        Store.open("postgresql://h/d")
