"""Interference on shared GPUs: the slowdown of a new replica, and the delay it causes to those already running.

A GPU is as loaded as it was seen to be busy, and no less than the deployments ask of it whose rates are told. What
was seen holds queues that are still worked off and whoever else is there; what is asked may be more than a GPU can
do, and is known sooner. What is asked:

*   Of one at a time: rate times what a request takes, shared among all on a GPU (``placement.load_model``).
*   Of those that batch: what they keep from one who always runs there (``placement.batch_load``), which is no more
    than an even share.

Where only those stand that batch and are told of, and nobody else holds memory, who is busy is known: a queue is
theirs who have requests now, and what else was seen has passed, such as the start of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace

from placement.batch_load import Batching
from placement.batch_sharing import kept
from placement.load_model import Key, LoadedCluster, Tenant, crowd, crowd_slope, shares, slope, stretch
from placement.types import ClusterSnapshot, DeploymentState, GpuState, Placement

__all__ = ["Others"]

_Curve = Callable[[float], float]  # of a load

_ALIKE = 1 - 1e-9  # loads that differ by rounding only
_UNTOLD = 0.02  # of a GPU's memory: less that no deployment tells of is the driver's own


class Others:
    """Interference of one snapshot's deployments. Pure."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        told, batch, rest = _kinds(snapshot)
        cluster = LoadedCluster.of(replace(snapshot, deployments=tuple(told)))
        self._tenants, self._told = cluster.tenants, cluster.loads
        untold = {key for d in rest for key, _ in _memory(d)}
        seen = _Seen(batch, untold | cluster.tenants.keys())
        self._each_counts = untold | seen.keys
        asked = kept(_batching(batch), _batching(told))
        for key, load in self._told.items():
            asked[key] = asked.get(key, 0.0) + load
        self.loads: dict[Key, float] = {}  # of GPUs that have any
        for gpu in snapshot.gpus:
            key = (gpu.node_id, gpu.device_id)
            load = asked.get(key, 0.0)
            if gpu.load_fraction > load:
                load = max(load, seen.load(key, gpu))
            if load > 0:
                self.loads[key] = load

    def slowdown(self, placement: Placement) -> float:
        """Return how many times as long as on idle GPUs a request takes at ``placement``; at least 1."""
        return max(1.0, self._slowed(placement, stretch))

    def lost(self, placement: Placement) -> float:
        """Seconds that the requests of others lose together by each second that one at ``placement`` takes alone:
        the derivative of their number by what comes.

        A replica whose rate is told counts once, wherever it stands: a stage of it loses by what comes to its
        slowest GPU. Each GPU counts for the load of those that batch: by the derivative a split over all GPUs is
        chosen more often, and all wait for it (docs/decisions/0016). So it does for load that no rate explains, on
        a GPU where a deployment stands whose rate is not told or where none is known to stand: nobody knows who
        stands on several. Elsewhere what was seen beyond the rates is a queue of those who are told, and theirs.
        """
        return self._lost(placement, slope)

    def later(self, placement: Placement, load: float) -> float:
        """Return by how many seconds a request at ``placement`` and those of other deployments are later together,
        for each second that it takes alone, once there is ``load`` more on every GPU."""

        def in_all(more: float) -> float:
            own = self._slowed(placement, lambda seen: crowd(seen + more))
            return own + self._lost(placement, lambda seen: crowd_slope(seen + more))

        return in_all(load) - in_all(0.0)

    def _slowed(self, placement: Placement, times: _Curve) -> float:
        return sum(share * times(self._most(keys)) for share, keys in shares(placement))

    def _lost(self, placement: Placement, rises: _Curve) -> float:
        stages = shares(placement)
        comes: dict[Key, float] = {}
        met: dict[str, Tenant] = {}
        untold = 0.0
        for share, keys in stages:
            for key in keys:
                comes[key] = comes.get(key, 0.0) + share
                met |= self._tenants.get(key, {})
                if key in self._each_counts or key not in self._tenants:
                    load = self.loads.get(key, 0.0)
                    untold += share * max(0.0, load - self._told.get(key, 0.0)) * rises(load)
        return untold + sum(t.busy_fraction * self._grows(t, comes, rises) for t in met.values())

    def _grows(self, tenant: Tenant, comes: dict[Key, float], rises: _Curve) -> float:
        """The slowdown of ``tenant``, by what ``comes`` to each GPU."""
        grows = 0.0
        for share, keys in tenant.stages:
            most = self._most(keys)
            slowest = (comes.get(key, 0.0) for key in keys if self.loads.get(key, 0.0) >= most * _ALIKE)
            grows += share * rises(most) * max(slowest)
        return grows

    def _most(self, keys: tuple[Key, ...]) -> float:
        return max(self.loads.get(key, 0.0) for key in keys)


class _Seen:
    """Part of the load seen on each GPU that is still there."""

    def __init__(self, batch: Iterable[DeploymentState], others: Set[Key]) -> None:
        """``others``: where anybody stands that is not of ``batch``."""
        self._others = others
        self._bytes: dict[Key, int] = {}
        self._asking: dict[Key, int] = {}
        for deployment in batch:
            asks = _has_requests(deployment)
            for key, size_bytes in _memory(deployment):
                self._bytes[key] = self._bytes.get(key, 0) + size_bytes
                self._asking[key] = self._asking.get(key, 0) + asks

    @property
    def keys(self) -> Set[Key]:
        """GPUs where deployments of ``batch`` are placed."""
        return self._bytes.keys()

    def load(self, key: Key, gpu: GpuState) -> float:
        held_bytes = self._bytes.get(key)
        if held_bytes is None or key in self._others:
            return gpu.load_fraction
        if gpu.total_bytes - gpu.free_bytes - held_bytes > _UNTOLD * gpu.total_bytes:
            return gpu.load_fraction
        asking = self._asking[key]
        return min(gpu.load_fraction, asking / (asking + 1))


_Deployments = list[DeploymentState]


def _kinds(snapshot: ClusterSnapshot) -> tuple[_Deployments, _Deployments, _Deployments]:
    """Return unbatched deployments of known work, those that batch of known work, and the rest."""
    told, batch, rest = _Deployments(), _Deployments(), _Deployments()
    for deployment in snapshot.deployments:
        if all(replica.max_batch == 1 for replica in deployment.replicas):
            (told if deployment.is_work_known else rest).append(deployment)
        else:
            tells = deployment.requests_per_s == 0 or deployment.stays is not None
            (batch if tells else rest).append(deployment)
    return told, batch, rest


def _memory(deployment: DeploymentState) -> Iterator[tuple[Key, int]]:
    """Yield each GPU of every replica, with the bytes held there."""
    for replica in deployment.replicas:
        for stage in replica.placement.stages:
            for device in stage.device_ids:
                yield (stage.node_id, device), stage.bytes_per_gpu


def _has_requests(deployment: DeploymentState) -> bool:
    return deployment.waiting > 0 or any(replica.outstanding for replica in deployment.replicas)


def _batching(deployments: _Deployments) -> list[Batching]:
    """Their replicas; those of one share its requests evenly."""
    found = []
    for deployment in deployments:
        stays, one_s = deployment.stays, deployment.service_s
        alone_s, full_s = (one_s, one_s) if stays is None else (stays.alone_s, stays.full_s)
        for replica in deployment.replicas:
            rate = deployment.requests_per_s / len(deployment.replicas)
            found.append(
                Batching(rate, alone_s, full_s, replica.max_batch, replica.batches, shares(replica.placement))
            )
    return found
