"""Consolidation: the choice of the replica to remove when fewer suffice, and the move of its requests.

The removed replica frees GPUs. As in Punica, new requests go to the busiest replica that has room
(``routing.Busiest``), so that some replicas fall idle; requests that still run in one that can go are moved.
``scaling`` decides whether fewer suffice, and its limits keep that from going back and forth.
"""

from __future__ import annotations

from placement.actions import Drain
from placement.load_model import Key, shares
from placement.scaling import Scaling, replicas_for
from placement.types import ClusterSnapshot, DeploymentState, ReplicaState

__all__ = ["consolidate"]


def consolidate(snapshot: ClusterSnapshot, rule: Scaling) -> tuple[Drain, ...]:
    """Return at most one drain for each deployment with more replicas than it needs, two or more of them ready."""
    tenants: dict[Key, int] = {}
    for deployment in snapshot.deployments:
        for replica in deployment.replicas:
            for key in _gpus(replica):
                tenants[key] = tenants.get(key, 0) + 1
    orders = []
    for deployment in snapshot.deployments:
        found = _dispensable(deployment, rule, tenants)
        if found is not None:
            orders.append(Drain(name=deployment.name, replica_id=found.replica_id, evict=True))
    return tuple(orders)


def _dispensable(d: DeploymentState, rule: Scaling, tenants: dict[Key, int]) -> ReplicaState | None:
    ready = [replica for replica in d.replicas if replica.ready]
    if len(ready) < 2 or d.wanted != len(ready) or d.waiting or not 1 <= replicas_for(d, rule) < d.wanted:
        return None
    slots = sum(replica.max_batch - replica.outstanding for replica in ready)

    def freed(replica: ReplicaState) -> int:
        return sum(tenants[key] == 1 for key in _gpus(replica))

    # Its requests must find slots in the rest; then the most GPUs freed, then the fewest requests to move.
    able = [
        replica for replica in ready if slots - (replica.max_batch - replica.outstanding) >= replica.outstanding
    ]
    return min(able, key=lambda r: (-freed(r), r.outstanding, r.replica_id), default=None)


def _gpus(replica: ReplicaState) -> tuple[Key, ...]:
    return tuple(key for _, keys in shares(replica.placement) for key in keys)
