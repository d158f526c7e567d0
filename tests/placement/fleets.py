"""Small clusters with deployments that serve; imported as ``tests.placement.fleets``."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from placement.types import (
    ClusterSnapshot,
    DeploymentState,
    GpuState,
    Placement,
    ReplicaState,
    StagePlacement,
)

TOTAL = 100


def place(*gpus: int, size_bytes: int = 10, pp: int = 1) -> Placement:
    """On these GPUs of node "n", ``pp`` stages of two layers."""
    tp = len(gpus) // pp
    return Placement(
        tuple(
            StagePlacement(
                node_id="n",
                device_ids=tuple(f"g{gpu}" for gpu in gpus[i * tp : (i + 1) * tp]),
                first_layer=2 * i,
                num_layers=2,
                bytes_per_gpu=size_bytes,
            )
            for i in range(pp)
        )
    )


def serving(
    name: str,
    *placements: Placement,
    busy: float = 0.0,
    outstanding: tuple[int, ...] = (),
    max_batch: int = 4,
    wanted: int | None = None,
    waiting: int = 0,
    moving: bool = False,
    idle_s: float = 0.0,
    steady_s: float = 1000.0,
    work: float | None = None,
) -> DeploymentState:
    """Every replica ``busy`` for this fraction; or ``work`` replicas' worth of it arrives."""
    loads = outstanding or (0,) * len(placements)
    return DeploymentState(
        name=name,
        model=name,
        wanted=len(placements) if wanted is None else wanted,
        replicas=tuple(
            ReplicaState(
                replica_id=f"{name}#{i}", placement=placement, ready=True, outstanding=load, max_batch=max_batch
            )
            for i, (placement, load) in enumerate(zip(placements, loads, strict=True))
        ),
        moving=moving,
        waiting=waiting,
        requests_per_s=(busy * len(placements) if work is None else work) / 2.0,
        service_s=2.0,
        idle_s=idle_s,
        steady_s=steady_s,
    )


def fleet(num_gpus: int, *deployments: DeploymentState) -> ClusterSnapshot:
    """GPUs of 100 bytes whose free memory is what the deployments leave."""
    free = [TOTAL] * num_gpus
    for deployment in deployments:
        for replica in deployment.replicas:
            for stage in replica.placement.stages:
                for device in stage.device_ids:
                    free[int(device[1:])] -= stage.bytes_per_gpu
    assert min(free) >= 0
    gpus = tuple(
        GpuState(device_id=f"g{i}", node_id="n", gpu_index=i, total_bytes=TOTAL, free_bytes=free_bytes)
        for i, free_bytes in enumerate(free)
    )
    return ClusterSnapshot(gpus, deployments)


def moved(snapshot: ClusterSnapshot, name: str, replica_id: str, placement: Placement) -> ClusterSnapshot:
    """The same fleet with this replica elsewhere."""
    deployments = tuple(
        replace(
            d,
            replicas=tuple(
                replace(r, placement=placement) if r.replica_id == replica_id else r for r in d.replicas
            ),
        )
        if d.name == name
        else d
        for d in snapshot.deployments
    )
    return fleet(len(snapshot.gpus), *deployments)


@st.composite
def fleets(draw: st.DrawFn, most_replicas: int = 1) -> ClusterSnapshot:
    """Four to eight GPUs, up to six deployments of one or two GPUs each replica, some crowded, some idle; no two
    replicas of one deployment on one GPU."""
    num_gpus = draw(st.sampled_from([4, 6, 8]))
    free = [TOTAL] * num_gpus
    deployments = []
    for index in range(draw(st.integers(0, 6))):
        size = draw(st.integers(5, 60))
        tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
        firsts = st.lists(st.integers(0, num_gpus // 2 - 1), min_size=1, max_size=most_replicas, unique=True)
        placements = []
        for first in draw(firsts):
            gpus = [2 * first + i for i in range(tp * pp)]
            if min(free[gpu] for gpu in gpus) < size:
                continue
            for gpu in gpus:
                free[gpu] -= size
            placements.append(place(*gpus, size_bytes=size, pp=pp))
        if placements:
            deployments.append(serving(f"d{index}", *placements, busy=draw(st.floats(0, 1.2))))
    return fleet(num_gpus, *deployments)
