"""Look-ahead: of the places that several orders propose, the one that leaves the cluster cheapest to run.

Orders (``policies``) look at load and memory of single GPUs; they do not see what a placement does to those that
are there already, nor what another GPU costs. Look-ahead scores each proposal by a standing cost
(``load_model``, or any function) at the load of the last 120 s.

Of a large cluster each order proposes from the nodes of the GPUs that it prefers, 128 GPUs; where none of those
has room, from all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fingerprint.errors import ConfigError
from placement.fit import Placer
from placement.load_model import LoadedCluster, Tenant, shares
from placement.policies import Hybrid, LeastLoaded, Packing
from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement, PlacementPolicy, Refusal

__all__ = ["DEFAULT_GPU_PRICE", "FillUp", "LookAhead", "Score", "expected_busy_fraction", "look_ahead_price"]

DEFAULT_GPU_PRICE = 0.25  # requests; chosen before any result, swept in docs/placement.md

_SHORT_LIST = 128  # GPUs

Score = Callable[[Placement], float]  # lower is better


@dataclass(frozen=True, slots=True)
class FillUp:
    """GPUs that hold something first, of them the least loaded; then empty ones."""

    name: str = "fill-up"

    def tiers(self, gpus: tuple[GpuState, ...]) -> tuple[tuple[GpuState, ...], ...]:
        (order,) = LeastLoaded().tiers(gpus)
        tiers = (
            tuple(gpu for gpu in order if gpu.free_bytes < gpu.total_bytes),
            tuple(gpu for gpu in order if gpu.free_bytes >= gpu.total_bytes),
        )
        return tuple(tier for tier in tiers if tier)


_ORDERS: tuple[PlacementPolicy, ...] = (Packing(), FillUp(), Hybrid(), LeastLoaded())


def expected_busy_fraction(snapshot: ClusterSnapshot) -> float:
    """Return the busy fraction expected of a model of which nothing is known yet.

    It is the average of the existing replicas; a half without any.
    """
    busy = [d.busy_fraction for d in snapshot.deployments for _ in d.replicas]
    return sum(busy) / len(busy) if busy else 0.5


def look_ahead_price(policy: str) -> float | None:
    """Return the price of a GPU in a policy's name ``look-ahead[:PRICE]``; None: another policy's name.

    Raises:
        ConfigError: a price that is not a number from 0.
    """
    name, separator, price = policy.partition(":")
    if name != "look-ahead":
        return None
    try:
        value = float(price) if separator else DEFAULT_GPU_PRICE
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{policy!r}: look-ahead's price of a GPU is a number of requests from 0")
    return value


class LookAhead:
    """Look-ahead placer on one snapshot, for any number of demands; answers as :class:`placement.fit.Placer` does.

    Args:
        busy_fraction: expected of what is placed; None: as what is there is on average.
        score: of a placement, in place of the load model's standing cost.

    Raises:
        ConfigError: a snapshot that contradicts itself.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        *,
        gpu_price: float = DEFAULT_GPU_PRICE,
        busy_fraction: float | None = None,
        link_group_size: int | None = None,
        score: Score | None = None,
    ) -> None:
        self._snapshot, self._link = snapshot, link_group_size
        self._placers = [
            Placer(_short_list(snapshot, order), order, link_group_size=link_group_size) for order in _ORDERS
        ]
        self._gpu_price = gpu_price
        self._busy = expected_busy_fraction(snapshot) if busy_fraction is None else busy_fraction
        self._cluster = LoadedCluster.of(snapshot)
        self._score = score or self._standing_cost

    def fit(self, demand: BlockDemand) -> Placement | Refusal:
        """Return the cheapest proposal, of equals the first order's; a refusal where no order finds room."""
        proposals: dict[Placement, None] = {}
        for placer in self._placers:
            answer = placer.fit(demand)
            if isinstance(answer, Placement):
                proposals[answer] = None
        if not proposals:
            return Placer(self._snapshot, FillUp(), link_group_size=self._link).fit(demand)
        return min(proposals, key=self._score)

    def _standing_cost(self, placement: Placement) -> float:
        return self._cluster.cost_of_adding(Tenant(self._busy, shares(placement)), self._gpu_price)


def _short_list(snapshot: ClusterSnapshot, order: PlacementPolicy) -> ClusterSnapshot:
    if len(snapshot.gpus) <= _SHORT_LIST:
        return snapshot
    nodes: dict[str, list[GpuState]] = {}
    for tier in order.tiers(snapshot.gpus):
        for gpu in tier:
            nodes.setdefault(gpu.node_id, []).append(gpu)
    chosen: list[GpuState] = []
    for gpus in nodes.values():
        chosen += gpus
        if len(chosen) >= _SHORT_LIST:
            break
    return ClusterSnapshot(tuple(chosen))
