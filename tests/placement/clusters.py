"""Small clusters of tiny GPUs, and what a placement on them must be; imported as ``tests.placement.clusters``."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import strategies as st

from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement


def gpu(index: int, free_bytes: int, *, node: str = "a", load: float = 0.0, total_bytes: int = 1000) -> GpuState:
    return GpuState(
        device_id=f"{node}{index}",
        node_id=node,
        gpu_index=index,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        load_fraction=load,
    )


def cluster(*gpus: GpuState) -> ClusterSnapshot:
    return ClusterSnapshot(gpus)


def blocks(
    num_layers: int, *, tp: int = 1, pp: int = 1, layer: int = 10, first: int = 0, last: int = 0, fixed: int = 0
) -> BlockDemand:
    return BlockDemand(
        tp=tp,
        pp=pp,
        num_layers=num_layers,
        layer_bytes=layer,
        first_stage_bytes=first,
        last_stage_bytes=last,
        fixed_bytes=fixed,
    )


@st.composite
def snapshots(draw: st.DrawFn) -> ClusterSnapshot:
    """Up to 6 GPUs on up to 2 nodes, with few distinct loads and sizes, so that ties are common."""
    gpus = []
    for index in range(draw(st.integers(0, 6))):
        node = draw(st.sampled_from(["a", "b"]))
        free = draw(st.integers(0, 30))
        gpus.append(gpu(index, free, node=node, load=draw(st.sampled_from([0.0, 0.2, 0.5, 0.9])), total_bytes=40))
    return ClusterSnapshot(tuple(gpus))


def demands() -> st.SearchStrategy[BlockDemand]:
    return st.builds(
        BlockDemand,
        tp=st.sampled_from([1, 1, 2, 3]),
        pp=st.sampled_from([1, 2, 3]),
        num_layers=st.integers(1, 8),
        layer_bytes=st.integers(0, 6),
        first_stage_bytes=st.integers(0, 6),
        last_stage_bytes=st.integers(0, 6),
        fixed_bytes=st.integers(0, 5),
    )


def permuted(data: st.DataObject, snapshot: ClusterSnapshot) -> ClusterSnapshot:
    return ClusterSnapshot(tuple(data.draw(st.permutations(snapshot.gpus))))


def with_more_memory(snapshot: ClusterSnapshot, extra_bytes: int) -> ClusterSnapshot:
    """The same GPUs, each larger by ``extra_bytes`` that are free."""
    return ClusterSnapshot(
        tuple(
            replace(g, free_bytes=g.free_bytes + extra_bytes, total_bytes=g.total_bytes + extra_bytes)
            for g in snapshot.gpus
        )
    )


def brute_force_fits(demand: BlockDemand, snapshot: ClusterSnapshot, longest: int | None = None) -> bool:
    """Every choice of disjoint TP groups for the stages in turn, each filled to its brim or to ``longest``."""
    nodes: dict[str, list[GpuState]] = {}
    for one in snapshot.gpus:
        nodes.setdefault(one.node_id, []).append(one)
    groups = [group for members in nodes.values() for group in combinations(members, demand.tp)]

    def most(group: tuple[GpuState, ...], stage: int) -> int:
        room = min(member.free_bytes for member in group)
        bound = demand.num_layers if longest is None else longest
        fitting = [n for n in range(bound + 1) if demand.stage_bytes(stage, n) <= room]
        return max(fitting, default=0)

    def place(stage: int, used: frozenset[str], left: int) -> bool:
        if stage == demand.pp:
            return left <= 0
        for group in groups:
            members = {member.device_id for member in group}
            if (
                not members & used
                and (layers := most(group, stage)) >= 1
                and place(stage + 1, used | members, left - layers)
            ):
                return True
        return False

    return demand.pp <= demand.num_layers and place(0, frozenset(), demand.num_layers)


def check_placement(placement: Placement, demand: BlockDemand, snapshot: ClusterSnapshot) -> None:
    """Check that no GPU is used twice or over-filled, each stage is on tp GPUs of one node, and layers are in
    order.
    """
    by_id = {one.device_id: one for one in snapshot.gpus}
    assert len(placement.stages) == demand.pp
    assert len(placement.device_ids) == len(set(placement.device_ids)) == demand.tp * demand.pp
    next_layer = 0
    for index, stage in enumerate(placement.stages):
        assert stage.first_layer == next_layer
        assert stage.num_layers >= 1
        next_layer += stage.num_layers
        assert stage.bytes_per_gpu == demand.stage_bytes(index, stage.num_layers)
        assert len(stage.device_ids) == demand.tp
        for device_id in stage.device_ids:
            assert by_id[device_id].node_id == stage.node_id
            assert by_id[device_id].free_bytes >= stage.bytes_per_gpu
    assert next_layer == demand.num_layers
