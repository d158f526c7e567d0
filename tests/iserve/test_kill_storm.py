"""Kill -9 of the controller at random moments: nothing that was acknowledged is lost, nothing runs twice, nothing
is left."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fingerprint.errors import StateUnavailableError
from tests.iserve.kill_storm import Outcome, Storm, wait
from tests.iserve.postgres_server import PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    if request.param == "sqlite":
        return tmp_path / "home" / "state.db"
    url = request.getfixturevalue("postgres").make_database()
    assert isinstance(url, str)
    return url


@pytest.fixture
def make_storm(tmp_path: Path) -> Iterator[Callable[..., Storm]]:
    made: list[Storm] = []

    def make(where: Path | str, *, seed: int) -> Storm:
        made.append(Storm(tmp_path, where, seed=seed))
        return made[-1]

    yield make
    for storm in made:
        storm.close()


def survived(storm: Storm, blow: Callable[[], None], times: int) -> Outcome:
    try:
        outcome = storm.run(blow, times)
        assert "Traceback" not in storm.controllers.log
    except AssertionError as error:
        error.add_note(storm.controllers.log[-6000:])
        raise
    return outcome


def test_a_few_kills(make_storm: Callable[..., Storm], tmp_path: Path) -> None:
    storm = make_storm(tmp_path / "home" / "state.db", seed=5)
    survived(storm, lambda: storm.kill(within_s=0.6), 5)


def test_a_database_that_goes_away_and_comes_back(
    make_storm: Callable[..., Storm], postgres: PostgresServer
) -> None:
    """Meanwhile the controller answers 503, and then goes on: it is the same process."""
    storm = make_storm(postgres.make_database(), seed=1)
    moment = random.Random(2)
    storm.controllers.start()
    wait(storm.controllers.answers, "the controller answers")
    first = storm.controllers.pid

    def restart() -> None:
        time.sleep(moment.uniform(0.0, 0.6))
        postgres.stop(moment.choice([signal.SIGINT, signal.SIGQUIT]))
        try:
            with pytest.raises(StateUnavailableError, match="the state database cannot be read"):
                storm.controllers.client().get("/api/v1/deployments", object)
            time.sleep(moment.uniform(0.0, 0.3))
        finally:
            postgres.start()
        wait(storm.controllers.answers, "the controller answers again")

    survived(storm, restart, 2)
    assert storm.controllers.pid == first


@pytest.mark.long
def test_a_hundred_kills(make_storm: Callable[..., Storm], where: Path | str) -> None:
    storm = make_storm(where, seed=100)
    outcome = survived(storm, storm.kill, 100)
    print(f"\n{outcome}")
    assert outcome.lost > 0  # else the kills fell where no request was made
    assert outcome.started > 0
