"""Bound on a server's connections: which gives way, and how long a request may be awaited."""

from __future__ import annotations

import asyncio
import resource

import pytest

from daemon.connections import ConnectionLimit
from daemon.file_limit import most_connections, raise_file_limit


def ended_of(most: int, *steps: str, wait_s: float | None = None, then_s: float = 0.0) -> list[str]:
    """Return which connections were ended, in this order, by steps such as ``opened a``."""
    ended: list[str] = []

    async def run() -> None:
        limit: ConnectionLimit[str] = ConnectionLimit(most, ended.append, wait_s=wait_s)
        for step in steps:
            what, connection = step.split()
            getattr(limit, what)(connection)
        await asyncio.sleep(then_s)

    asyncio.run(run())
    return ended


THREE = ("opened a", "opened b", "opened c")


@pytest.mark.parametrize(
    ("steps", "ended"),
    [
        pytest.param((), [], id="no-more-than-allowed"),
        pytest.param(("opened d", "opened e"), ["a", "b"], id="who-has-waited-longest"),
        pytest.param(("works a", "opened d"), ["b"], id="not-who-works"),
        pytest.param(("works a", "waits a", "opened d"), ["b"], id="an-answer-begins-the-wait-anew"),
        pytest.param(("works a", "works b", "works c", "opened d"), ["d"], id="the-newcomer-when-all-work"),
        pytest.param(("closed b", "closed b", "opened d"), [], id="what-is-closed-counts-once"),
        pytest.param(("closed a", "waits a", "opened d", "opened e"), ["b"], id="what-is-closed-waits-no-more"),
    ],
)
def test_beyond_the_limit_the_one_that_has_waited_longest_gives_way(
    steps: tuple[str, ...], ended: list[str]
) -> None:
    assert ended_of(3, *THREE, *steps) == ended


def test_none_waits_longer_than_allowed_and_work_has_no_limit() -> None:
    assert ended_of(3, *THREE, "works b", wait_s=0.01, then_s=0.2) == ["a", "c"]


def test_fewer_where_few_files_may_be_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        assert most_connections(100) == 100
        assert most_connections(1000) == 256
        assert most_connections(1000, files_each=2) == 128
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65_536, limits[1]), limits[1])
        assert most_connections(1000) == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
