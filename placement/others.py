"""What runs on the GPUs already, to one who would join: how much longer its requests take there, and what those of
others lose.

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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from placement.batch_load import Batching, mean_speed, settle
from placement.load_model import Key, LoadedCluster, Tenant, shares, slope, stretch
from placement.types import ClusterSnapshot, DeploymentState, GpuState, Placement

__all__ = ["Others"]

_ALIKE = 1 - 1e-9  # loads that differ by rounding only
_UNTOLD = 0.02  # of a GPU's memory: less that no deployment tells of is the driver's own

_Stages = tuple[tuple[float, tuple[Key, ...]], ...]


class Others:
    """Of one snapshot. Pure."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        told = tuple(d for d in snapshot.deployments if d.is_work_known and _one_at_a_time(d))
        batch = tuple(d for d in snapshot.deployments if _tells_of_batches(d))
        cluster = LoadedCluster.of(replace(snapshot, deployments=told))
        self._tenants, self._told = cluster.tenants, dict(cluster.loads)
        self._batching: dict[Key, dict[str, Batching]] = {}
        self._grows: dict[str, float] = {}  # requests of those, by each further once that they are slowed
        if batch:
            self._settle(told, batch)
        known = {d.name for d in (*told, *batch)}
        untold = (d for d in snapshot.deployments if d.name not in known)
        self._beside_untold = {key for key, _ in _memory(untold)}
        seen = _Seen(told, batch, self._beside_untold)
        self.loads: dict[Key, float] = {}  # of GPUs that have any
        for gpu in snapshot.gpus:
            key = (gpu.node_id, gpu.device_id)
            load = max(seen.load(gpu), self._told.get(key, 0.0))
            if load > 0:
                self.loads[key] = load

    def _settle(self, told: Iterable[DeploymentState], batch: Iterable[DeploymentState]) -> None:
        """Adds to what is told what those ask that batch."""
        batching = dict(tenant for d in batch for tenant in _batching(d))
        everybody = batching | dict(tenant for d in told for tenant in _batching(d))
        alone, joined = settle(everybody)
        running: dict[Key, list[float]] = {}
        for name, tenant in batching.items():
            slowed = alone.slowed[name]
            self._grows[name] = tenant.crowd(slowed).variance / slowed
            for share, keys in tenant.stages:
                for key in keys:
                    self._batching.setdefault(key, {})[name] = tenant
                    running.setdefault(key, []).append(min(1.0, share * joined.batches[name]))
        for key, here in running.items():
            self._told[key] = self._told.get(key, 0.0) + 1 - mean_speed(here)

    def slowdown(self, placement: Placement) -> float:
        """How many times as long as on idle GPUs a request takes at ``placement``; at least 1."""
        return max(1.0, sum(share * stretch(self._most(keys)) for share, keys in shares(placement)))

    def lost(self, placement: Placement) -> float:
        """Seconds that the requests of others lose together by each second that one at ``placement`` takes alone:
        the derivative of their number by what comes.

        A replica whose rate is told counts once, wherever it stands: a stage of it loses by what comes to its
        slowest GPU. One that batches shares that with one more for as long as the request stays there. Of load
        that no rate explains, on a GPU where a deployment stands whose rate is not told or where none is known
        to stand, nobody knows who stands on several GPUs: each GPU counts. Elsewhere what was seen beyond the
        rates is a queue of those who are told, and theirs.
        """
        comes: dict[Key, float] = {}
        met: dict[str, Tenant] = {}
        batching: dict[str, Batching] = {}
        untold = 0.0
        for share, keys in shares(placement):
            for key in keys:
                comes[key] = comes.get(key, 0.0) + share
                met |= self._tenants.get(key, {})
                batching |= self._batching.get(key, {})
                if key in self._beside_untold or (key not in self._tenants and key not in self._batching):
                    load = self.loads.get(key, 0.0)
                    untold += share * max(0.0, load - self._told.get(key, 0.0)) * slope(load)
        lost = untold + sum(t.busy_fraction * self._meets(t.stages, comes, slope) for t in met.values())
        if batching:
            stays = self.slowdown(placement)
            for name, tenant in batching.items():
                lost += self._grows[name] * self._meets(tenant.stages, comes, lambda _: stays)
        return lost

    def _meets(self, stages: _Stages, comes: dict[Key, float], grows: Callable[[float], float]) -> float:
        """The slowdown of who stands on ``stages``, by what ``comes`` to each GPU: as a stage ``grows`` with it
        under the load of its slowest GPU."""
        met = 0.0
        for share, keys in stages:
            most = self._most(keys)
            slowest = (comes.get(key, 0.0) for key in keys if self.loads.get(key, 0.0) >= most * _ALIKE)
            met += share * grows(most) * max(slowest)
        return met

    def _most(self, keys: tuple[Key, ...]) -> float:
        return max(self.loads.get(key, 0.0) for key in keys)


class _Seen:
    """How much of what a GPU was seen busy is still there."""

    def __init__(
        self, told: Iterable[DeploymentState], batch: tuple[DeploymentState, ...], untold: set[Key]
    ) -> None:
        self._others = untold | {key for key, _ in _memory(told)}
        self._bytes: Counter[Key] = Counter()
        for key, size_bytes in _memory(batch):
            self._bytes[key] += size_bytes
        self._asking = Counter(key for d in batch if _has_requests(d) for key, _ in _memory([d]))

    def load(self, gpu: GpuState) -> float:
        key = (gpu.node_id, gpu.device_id)
        if key not in self._bytes or key in self._others:
            return gpu.load_fraction
        if gpu.total_bytes - gpu.free_bytes - self._bytes[key] > _UNTOLD * gpu.total_bytes:
            return gpu.load_fraction
        asking = self._asking[key]
        return min(gpu.load_fraction, asking / (asking + 1))


def _memory(deployments: Iterable[DeploymentState]) -> Iterator[tuple[Key, int]]:
    """Of every replica on every GPU."""
    for deployment in deployments:
        for replica in deployment.replicas:
            for stage in replica.placement.stages:
                for device in stage.device_ids:
                    yield (stage.node_id, device), stage.bytes_per_gpu


def _one_at_a_time(deployment: DeploymentState) -> bool:
    return all(replica.max_batch == 1 for replica in deployment.replicas)


def _tells_of_batches(deployment: DeploymentState) -> bool:
    return not _one_at_a_time(deployment) and (deployment.requests_per_s == 0 or deployment.stays is not None)


def _has_requests(deployment: DeploymentState) -> bool:
    return deployment.waiting > 0 or any(replica.outstanding for replica in deployment.replicas)


def _batching(deployment: DeploymentState) -> Iterator[tuple[str, Batching]]:
    """Its replicas, which share its requests evenly."""
    stays, one_s = deployment.stays, deployment.service_s
    for replica in deployment.replicas:
        yield (
            replica.replica_id,
            Batching(
                requests_per_s=deployment.requests_per_s / len(deployment.replicas),
                alone_s=one_s if stays is None else stays.alone_s,
                full_s=one_s if stays is None else stays.full_s,
                slots=replica.max_batch,
                batches=replica.batches,
                stages=shares(replica.placement),
            ),
        )
