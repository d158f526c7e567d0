"""What runs on the GPUs already, to one who would join: how much longer its requests take there, and what those of
others lose.

A GPU is as loaded as it was seen to be busy, and no less than the deployments ask of it whose rates are told: rate
times what a request takes, shared among all on a GPU (``placement.load_model``). What was seen holds queues that
are still worked off and whoever else is there; what is asked may be more than a GPU can do, and is known sooner.

Of workers that batch only what was seen counts: one that is slowed takes more requests at once instead, so that
its rate does not tell how much it asks of a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from placement.load_model import Key, LoadedCluster, Tenant, shares, slope, stretch
from placement.types import ClusterSnapshot, DeploymentState, Placement

__all__ = ["Others"]

_ALIKE = 1 - 1e-9  # loads that differ by rounding only


class Others:
    """Of one snapshot. Pure."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        told = tuple(d for d in snapshot.deployments if d.is_work_known and _one_at_a_time(d))
        cluster = LoadedCluster.of(replace(snapshot, deployments=told))
        self._tenants, self._told = cluster.tenants, cluster.loads
        untold = (d for d in snapshot.deployments if not (d.is_work_known and _one_at_a_time(d)))
        stood_on = (keys for d in untold for replica in d.replicas for _, keys in shares(replica.placement))
        self._beside_untold = {key for keys in stood_on for key in keys}
        self.loads: dict[Key, float] = {}  # of GPUs that have any
        for gpu in snapshot.gpus:
            key = (gpu.node_id, gpu.device_id)
            load = max(gpu.load_fraction, cluster.loads.get(key, 0.0))
            if load > 0:
                self.loads[key] = load

    def slowdown(self, placement: Placement) -> float:
        """How many times as long as on idle GPUs a request takes at ``placement``; at least 1."""
        return max(1.0, sum(share * stretch(self._most(keys)) for share, keys in shares(placement)))

    def lost(self, placement: Placement) -> float:
        """Seconds that the requests of others lose together by each second that one at ``placement`` takes alone:
        the derivative of their number by what comes.

        A replica whose rate is told counts once, wherever it stands: a stage of it loses by what comes to its
        slowest GPU. Of load that no rate explains, on a GPU where a deployment stands whose rate is not told or
        where none is known to stand, nobody knows who stands on several GPUs: each GPU counts. Elsewhere what was
        seen beyond the rates is a queue of those who are told, and theirs.
        """
        stages = shares(placement)
        comes: dict[Key, float] = {}
        met: dict[str, Tenant] = {}
        untold = 0.0
        for share, keys in stages:
            for key in keys:
                comes[key] = comes.get(key, 0.0) + share
                met |= self._tenants.get(key, {})
                if key in self._beside_untold or key not in self._tenants:
                    load = self.loads.get(key, 0.0)
                    untold += share * max(0.0, load - self._told.get(key, 0.0)) * slope(load)
        return untold + sum(tenant.busy_fraction * self._grows(tenant, comes) for tenant in met.values())

    def _grows(self, tenant: Tenant, comes: dict[Key, float]) -> float:
        """The slowdown of ``tenant``, by what ``comes`` to each GPU."""
        grows = 0.0
        for share, keys in tenant.stages:
            most = self._most(keys)
            slowest = (comes.get(key, 0.0) for key in keys if self.loads.get(key, 0.0) >= most * _ALIKE)
            grows += share * slope(most) * max(slowest)
        return grows

    def _most(self, keys: tuple[Key, ...]) -> float:
        return max(self.loads.get(key, 0.0) for key in keys)


def _one_at_a_time(deployment: DeploymentState) -> bool:
    return all(replica.max_batch == 1 for replica in deployment.replicas)
