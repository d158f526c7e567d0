"""Cost of sharing GPUs: the fast evaluator behind look-ahead, migration and consolidation.

A replica that is busy for a fraction u of its time, were its GPUs its own, brings u times a stage's share of the
step to each GPU of that stage. A GPU with the load r divides its time evenly among those that run, so each request
takes ``1 / (1 - r)`` times as long there: the mean sojourn of M/G/1 processor sharing, whatever the lengths
(Kleinrock, Queueing Systems II, section 4.4). Stages follow one another, a TP group is as slow as its slowest GPU.

The *standing cost* of a layout is the mean number of requests in it (by Little's law: rate times time, summed over
replicas) plus ``gpu_price`` times the GPUs that hold anything. The price says how many waiting or running requests
one more GPU must take away to be worth having.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from placement.types import ClusterSnapshot, Placement

__all__ = [
    "Key",
    "LoadedCluster",
    "Tenant",
    "shares",
    "slowdown",
    "stretch",
]

Key = tuple[str, str]  # (node_id, device_id)

# Beyond, a queue has no mean: the cost goes on along its tangent, finite, and the fuller the dearer.
_FULL = 0.95


def stretch(load: float) -> float:
    """Return how many times as long a request takes on a GPU with this load, its own included; at least 1."""
    if load <= _FULL:
        return 1.0 / (1.0 - max(load, 0.0))
    idle = 1.0 - _FULL
    return 1.0 / idle + (load - _FULL) / idle**2


def shares(placement: Placement) -> tuple[tuple[float, tuple[Key, ...]], ...]:
    """Each stage's share of the step, and its GPUs."""
    stages = placement.stages
    layers = sum([stage.num_layers for stage in stages])  # lists: asked of hundreds of replicas for each decision
    return tuple(
        [(s.num_layers / layers, tuple([(s.node_id, device) for device in s.device_ids])) for s in stages]
    )


@dataclass(frozen=True, slots=True)
class Tenant:
    """A replica as the load model sees it."""

    busy_fraction: float  # of its time, were its GPUs its own
    stages: tuple[tuple[float, tuple[Key, ...]], ...]

    @property
    def gpus(self) -> tuple[Key, ...]:
        return tuple(key for _, keys in self.stages for key in keys)


def slowdown(tenant: Tenant, loads: Mapping[Key, float]) -> float:
    return sum(share * stretch(max([loads.get(key, 0.0) for key in keys])) for share, keys in tenant.stages)


@dataclass(slots=True)
class LoadedCluster:
    """Tenants of each GPU, and the load that they leave on it."""

    loads: dict[Key, float] = field(default_factory=dict)
    tenants: dict[Key, dict[str, Tenant]] = field(default_factory=dict)  # by GPU, then by replica

    @classmethod
    def of(cls, snapshot: ClusterSnapshot) -> LoadedCluster:
        cluster = cls()
        for deployment in snapshot.deployments:
            for replica in deployment.replicas:
                tenant = Tenant(deployment.busy_fraction, shares(replica.placement))
                cluster.put(replica.replica_id, tenant)
        return cluster

    def put(self, replica_id: str, tenant: Tenant) -> None:
        for share, keys in tenant.stages:
            for key in keys:
                self.loads[key] = self.loads.get(key, 0.0) + tenant.busy_fraction * share
                self.tenants.setdefault(key, {})[replica_id] = tenant

    def take(self, replica_id: str, tenant: Tenant) -> None:
        for share, keys in tenant.stages:
            for key in keys:
                here = self.tenants[key]
                del here[replica_id]
                if here:
                    self.loads[key] -= tenant.busy_fraction * share
                else:  # exactly as if nothing had been there
                    del self.tenants[key], self.loads[key]

    def requests(self, near: Iterable[Key]) -> float:
        """Mean number of requests in the replicas that have a place on any of these GPUs."""
        met: dict[str, Tenant] = {}
        for key in near:
            met.update(self.tenants.get(key, {}))
        return sum(t.busy_fraction * slowdown(t, self.loads) for t in met.values())

    def held(self, near: Iterable[Key]) -> int:
        """Return how many of these GPUs hold anything."""
        return sum(bool(self.tenants.get(key)) for key in near)

    def standing_cost(self, gpu_price: float) -> float:
        """Return the standing cost of everything (module docstring)."""
        return self._cost(self.tenants, gpu_price)

    def cost_of_adding(self, tenant: Tenant, gpu_price: float) -> float:
        """Return by how much the standing cost rises when ``tenant`` is added."""
        gpus = tenant.gpus
        before = self._cost(gpus, gpu_price)
        self.put("", tenant)
        after = self._cost(gpus, gpu_price)
        self.take("", tenant)
        return after - before

    def saved_by_taking(self, replica_id: str, tenant: Tenant, gpu_price: float) -> float:
        """Take ``tenant`` away; return by how much the standing cost falls."""
        gpus = tenant.gpus
        before = self._cost(gpus, gpu_price)
        self.take(replica_id, tenant)
        return before - self._cost(gpus, gpu_price)

    def _cost(self, near: Iterable[Key], gpu_price: float) -> float:
        return self.requests(near) + gpu_price * self.held(near)
