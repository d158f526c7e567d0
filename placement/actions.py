"""Actions that a policy may ask of a running cluster.

Values: the cluster's controller or simulator carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from placement.types import ClusterSnapshot, Placement

__all__ = ["ClusterAction", "ClusterPolicy", "Drain", "Move", "Scale"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """``name`` is to have this many replicas. New ones are placed as a deploy places them; of too many, the
    youngest drain. At zero, requests wait, and start it."""

    name: str
    replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """This replica is to go: what waits in it goes elsewhere at once, what runs there ends first.

    ``evict``: running requests go elsewhere too, where their prompts and what they have answered so far are
    computed anew (as Punica moves a request); it needs a further replica.
    """

    name: str
    replica_id: str
    evict: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Move of a replica to ``placement``: a second one is loaded there and takes over, the first drains.

    Moves of one look are one transaction: memory for all is taken first, the replicas drain when all of the second
    ones are loaded, and where one cannot be, all stay where they are.
    """

    name: str
    replica_id: str
    placement: Placement
    load_s: float  # until the second serves; the first serves meanwhile, and both hold memory


ClusterAction: TypeAlias = Scale | Drain | Move


class ClusterPolicy(Protocol):
    """Policy that looks at the cluster every ``every_s``, and at each request that finds no replica."""

    @property
    def name(self) -> str: ...
    @property
    def every_s(self) -> float: ...

    def __call__(self, snapshot: ClusterSnapshot) -> Sequence[ClusterAction]: ...
