"""Answers to changes of routes: once the gateway has a table that was read after the change, or patience ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from iserve.controller.followed_routes import FollowedRoutes
from tests.waiting import PATIENCE_S


class Gateway:
    """Version in force; each look at it is an event."""

    def __init__(self) -> None:
        self.version: int | None = 1
        self.is_broken = False
        self._looks = threading.Semaphore(0)

    def in_force(self) -> int | None:
        self._looks.release()
        if self.is_broken:
            raise OSError("no file descriptor is left")
        return self.version

    def looked(self, times: int = 2) -> None:
        """Wait until it was looked at so often; a look may have begun before the call, the next one did not."""
        for _ in range(times):
            assert self._looks.acquire(timeout=PATIENCE_S)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def routes(gateway: Gateway) -> Iterator[FollowedRoutes]:
    routes = FollowedRoutes(gateway.in_force, patience_s=PATIENCE_S)
    yield routes
    routes.close()


def test_a_change_is_followed_once_a_later_table_is_in_force(gateway: Gateway, routes: FollowedRoutes) -> None:
    before = routes.begin()
    following = routes.follow()
    routes.publish(before, 2)  # its content was read before the change
    gateway.version = 2
    assert not following.done()
    routes.publish(routes.begin(), 3)
    gateway.looked()
    assert not following.done()
    gateway.version = None
    gateway.looked()
    assert not following.done()
    gateway.version = 3
    assert following.result(PATIENCE_S)


def test_a_change_that_changes_no_route_is_followed_at_once(gateway: Gateway, routes: FollowedRoutes) -> None:
    following = routes.follow()
    routes.publish(routes.begin(), 1)
    assert following.result(PATIENCE_S)


def test_a_look_that_fails_shows_nothing_and_another_is_made(gateway: Gateway, routes: FollowedRoutes) -> None:
    gateway.is_broken = True
    following = routes.follow()
    routes.publish(routes.begin(), 1)
    gateway.looked()
    assert not following.done()
    gateway.is_broken = False
    assert following.result(PATIENCE_S)


def test_many_wait_together(gateway: Gateway, routes: FollowedRoutes) -> None:
    first = [routes.follow() for _ in range(50)]
    ticket = routes.begin()
    last = routes.follow()
    routes.publish(ticket, 2)
    gateway.version = 2
    assert all(one.result(PATIENCE_S) for one in first)
    assert not last.done()
    assert not last.cancel(), "a caller that leaves takes nothing from the rest"
    routes.close()
    assert not last.result(PATIENCE_S)
    assert not routes.follow().result(PATIENCE_S)


def test_patience_ends() -> None:
    routes = FollowedRoutes(lambda: None, patience_s=0.05)
    assert not routes.follow().result(PATIENCE_S)
    routes.close()
