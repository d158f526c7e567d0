"""Routing policies: the choice of the replica that takes a request. Whether it has room is for the replica.

A new policy is a class with ``name`` and ``choose``, one line in ``ROUTERS``, and a row of the shared test
(tests/placement/test_routing.py). A test holds least-outstanding to what ``iserve.gateway.dispatch`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fingerprint.errors import ConfigError

__all__ = [
    "DEFAULT_ROUTER",
    "ROUTERS",
    "Busiest",
    "LeastOutstanding",
    "Replica",
    "RoundRobin",
    "Router",
    "make_router",
]

DEFAULT_ROUTER = "least-outstanding"


class Replica(Protocol):
    """Facts of one replica that has room, now."""

    @property
    def outstanding(self) -> int: ...  # requests that it has, running and waiting
    @property
    def max_batch(self) -> int: ...  # of those, how many can run at once
    @property
    def last_turn(self) -> int: ...  # of the request that it was given last, -1 before the first


class Router(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        """Return the index of the replica for the ``turn``-th request (from 0); there is at least one replica."""
        ...


@dataclass(frozen=True, slots=True)
class LeastOutstanding:
    """Fewest requests; of equals the one not used for longest. The gateway's rule."""

    name: str = "least-outstanding"

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        return min(range(len(replicas)), key=lambda i: (replicas[i].outstanding, replicas[i].last_turn))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The one not used for longest, whatever they do."""

    name: str = "round-robin"

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        return min(range(len(replicas)), key=lambda i: replicas[i].last_turn)


@dataclass(frozen=True, slots=True)
class Busiest:
    """Choose the fullest that has a slot free, so that some fall idle (Punica); none free: fewest requests."""

    name: str = "busiest"

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        free = [i for i, replica in enumerate(replicas) if replica.outstanding < replica.max_batch]
        if free:
            return max(free, key=lambda i: (replicas[i].outstanding, -i))
        return min(range(len(replicas)), key=lambda i: replicas[i].outstanding)


ROUTERS: dict[str, Callable[[], Router]] = {
    "least-outstanding": LeastOutstanding,
    "round-robin": RoundRobin,
    "busiest": Busiest,
}


def make_router(name: str = DEFAULT_ROUTER) -> Router:
    """Return the policy of that name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in ROUTERS:
        raise ConfigError(f"there is no routing policy {name!r}; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
