"""Migration of replicas: whether a replica should move, and where, when what that saves pays for the move.

Both directions are one rule. Leaving a crowded GPU saves requests that wait; joining busy GPUs saves a GPU. A move
is ordered when the fall of the standing cost (``load_model``), kept up until ``horizon_s``, exceeds what the move
takes: ``gpu_price`` for each GPU-second in which the replica holds memory twice. No move leads to a GPU on which
another replica of the same deployment is placed: the two would share its time (``replicas``). Every move that is
made lowers the standing cost by more than a positive margin and the way back would raise it, so at a constant load
moves end, and one is undone only after the load has changed by twice the margin's worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fingerprint.errors import ConfigError
from placement.actions import Move
from placement.load_model import Key, LoadedCluster, Tenant, shares
from placement.lookahead import DEFAULT_GPU_PRICE
from placement.types import ClusterSnapshot, DeploymentState, GpuState, Placement, ReplicaState

__all__ = ["Migration", "best_move", "load_s"]

_CONSIDERED = 8  # hottest and coldest GPUs whose tenants may move, and target groups for each


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """Prices and times of a move.

    Raises:
        ConfigError: a value that is not above 0.
    """

    gpu_price: float = DEFAULT_GPU_PRICE
    horizon_s: float = 120.0  # for which the load is taken to stay: the window it was seen over
    load_bytes_per_s: float = 2e9  # of weights onto one GPU, from local disk
    start_s: float = 10.0  # of an engine, without its weights
    hold_s: float = 120.0  # without a change, before a replica of a deployment moves

    def __post_init__(self) -> None:
        if not min(self.gpu_price, self.horizon_s, self.load_bytes_per_s, self.start_s) > 0 or self.hold_s < 0:
            raise ConfigError(f"a migration's price, horizon, speed and start must be above 0, got {self}")


def load_s(placement: Placement, rule: Migration) -> float:
    """Return the seconds from the order to the first request.

    They are the start, and the fullest GPU's memory at the stated speed (KV room counted as weights, which makes
    it longer than it is).
    """
    return rule.start_s + max(stage.bytes_per_gpu for stage in placement.stages) / rule.load_bytes_per_s


def best_move(snapshot: ClusterSnapshot, rule: Migration, *, link_group_size: int | None = None) -> Move | None:
    """Return the one move that pays most, or None: none pays, or one is under way (its effect is not seen yet)."""
    if any(deployment.moving for deployment in snapshot.deployments):
        return None
    cluster = LoadedCluster.of(snapshot)
    groups = _Groups(snapshot, cluster, link_group_size)
    best: Move | None = None
    most = 0.0
    for deployment, replica in _movable(snapshot, cluster, rule):
        held = frozenset(key for one in deployment.replicas for _, keys in shares(one.placement) for key in keys)
        tenant = Tenant(deployment.busy_fraction, shares(replica.placement))
        takes_s = load_s(replica.placement, rule)
        lasts_s = rule.horizon_s - takes_s
        price = rule.gpu_price * len(tenant.gpus) * takes_s
        freed = cluster.saved_by_taking(replica.replica_id, tenant, rule.gpu_price)
        for placement in groups.for_another(replica.placement, held):
            target = Tenant(deployment.busy_fraction, shares(placement))
            saved = freed - cluster.cost_of_adding(target, rule.gpu_price)
            pays = saved * lasts_s - price
            if pays > most:
                most = pays
                best = Move(
                    name=deployment.name, replica_id=replica.replica_id, placement=placement, load_s=takes_s
                )
        cluster.put(replica.replica_id, tenant)
    return best


def _movable(
    snapshot: ClusterSnapshot, cluster: LoadedCluster, rule: Migration
) -> Iterator[tuple[DeploymentState, ReplicaState]]:
    """Yield replicas on the hottest and the coldest GPUs that hold any, of deployments steady for long enough."""
    by_load = sorted(cluster.loads, key=lambda key: (cluster.loads[key], key))
    considered = {
        name for key in (*by_load[:_CONSIDERED], *by_load[-_CONSIDERED:]) for name in cluster.tenants[key]
    }
    for deployment in snapshot.deployments:
        if deployment.steady_s < rule.hold_s:
            continue
        for replica in deployment.replicas:
            if replica.ready and replica.replica_id in considered:
                yield deployment, replica


class _Groups:
    """TP groups of neighbours that a replica could move to: those that hold something by load, and the first
    empty ones."""

    def __init__(self, snapshot: ClusterSnapshot, cluster: LoadedCluster, link_group_size: int | None) -> None:
        self._link = link_group_size or 1
        # With their loads as they are before anybody moves.
        self._nodes: dict[str, list[tuple[float, GpuState]]] = {}
        for gpu in sorted(snapshot.gpus, key=lambda g: (g.node_id, g.gpu_index)):
            load = cluster.loads.get((gpu.node_id, gpu.device_id), 0.0)
            self._nodes.setdefault(gpu.node_id, []).append((load, gpu))
        self._of: dict[int, list[tuple[float, tuple[GpuState, ...]]]] = {}

    def for_another(self, placement: Placement, held: frozenset[Key]) -> Iterator[Placement]:
        """Yield placements of the same shape on GPUs with room that its deployment has not ``held``.

        All stages of a pipeline go, to groups next to one another in the order of preference.
        """
        tp = len(placement.stages[0].device_ids)
        need_bytes = max(stage.bytes_per_gpu for stage in placement.stages)
        fitting: list[tuple[GpuState, ...]] = []
        empty = 0
        for load, group in self._groups(tp):
            if any((gpu.node_id, gpu.device_id) in held or gpu.free_bytes < need_bytes for gpu in group):
                continue
            empty += load == 0.0
            if empty <= len(placement.stages):
                fitting.append(group)
            if len(fitting) >= _CONSIDERED:
                break
        for first in range(len(fitting) - len(placement.stages) + 1):
            chosen = fitting[first : first + len(placement.stages)]
            yield Placement(
                tuple(
                    replace(stage, node_id=group[0].node_id, device_ids=tuple(gpu.device_id for gpu in group))
                    for stage, group in zip(placement.stages, chosen, strict=True)
                )
            )

    def _groups(self, tp: int) -> list[tuple[float, tuple[GpuState, ...]]]:
        """Return the groups with their loads: loaded ones, the least loaded of them first, then the empty ones."""
        if tp not in self._of:
            aligned = self._link % tp == 0 or tp % self._link == 0
            step = tp if aligned else 1
            found = []
            for gpus in self._nodes.values():
                for first in range(0, len(gpus) - tp + 1, step):
                    loads, group = zip(*gpus[first : first + tp], strict=True)
                    found.append((max(loads), group))
            self._of[tp] = sorted(found, key=lambda one: one[0] or math.inf)
        return self._of[tp]
