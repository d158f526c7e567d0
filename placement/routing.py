"""Which replica takes a request. An index only; whether it has room is for the replica.

A new policy is a class with ``name`` and ``choose``, one line in ``ROUTERS``, and a row of the shared test
(tests/placement/test_routing.py). The gateway's own rule is least-outstanding (``iserve.gateway.dispatch``).
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
    """What is known of one replica now."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def max_batch(self) -> int: ...


class Router(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        """Index of the replica for the ``turn``-th request (from 0); there is at least one replica."""
        ...


def _outstanding(replica: Replica) -> int:
    return replica.num_running + replica.num_waiting


@dataclass(frozen=True, slots=True)
class LeastOutstanding:
    """Fewest requests running and waiting; of equals the first."""

    name: str = "least-outstanding"

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        return min(range(len(replicas)), key=lambda i: _outstanding(replicas[i]))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """One after the other, whatever they do."""

    name: str = "round-robin"

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        return turn % len(replicas)


@dataclass(frozen=True, slots=True)
class Busiest:
    """The fullest that has a slot free, so that others can fall idle (Punica); none free: fewest outstanding."""

    name: str = "busiest"

    def choose(self, replicas: Sequence[Replica], turn: int) -> int:
        free = [i for i, replica in enumerate(replicas) if _outstanding(replica) < replica.max_batch]
        if free:
            return max(free, key=lambda i: (_outstanding(replicas[i]), -i))
        return min(range(len(replicas)), key=lambda i: _outstanding(replicas[i]))


ROUTERS: dict[str, Callable[[], Router]] = {
    "least-outstanding": LeastOutstanding,
    "round-robin": RoundRobin,
    "busiest": Busiest,
}


def make_router(name: str = DEFAULT_ROUTER) -> Router:
    """The policy of that name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in ROUTERS:
        raise ConfigError(f"there is no routing policy {name!r}; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
