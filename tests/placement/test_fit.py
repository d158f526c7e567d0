"""Fitting blocks into GPUs: worked examples, refusals with their numbers, and laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import placement.fit
from fingerprint.config import even_split
from fingerprint.errors import ConfigError
from fingerprint.estimates import MemoryEstimate, Source
from placement.fit import Placer, demand, fit, split_layers
from placement.policies import Hybrid, LeastLoaded, Packing
from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement, Refusal
from tests.placement.clusters import (
    blocks,
    brute_force_fits,
    check_placement,
    cluster,
    demands,
    gpu,
    snapshots,
    with_more_memory,
)


def placed(wanted: BlockDemand, snapshot: ClusterSnapshot, **options: int) -> Placement:
    answer = fit(wanted, snapshot, LeastLoaded(), **options)
    assert isinstance(answer, Placement), answer
    check_placement(answer, wanted, snapshot)
    return answer


def refused(wanted: BlockDemand, snapshot: ClusterSnapshot) -> Refusal:
    answer = fit(wanted, snapshot, LeastLoaded())
    assert isinstance(answer, Refusal), answer
    return answer


GIB = 2**30


def memory(relative_error: float) -> MemoryEstimate:
    return MemoryEstimate(
        tp=2,
        pp=2,
        num_layers=80,
        layer_weight_bytes=100,
        layer_kv_bytes=7,
        first_stage_bytes=50,
        last_stage_bytes=60,
        activation_bytes=10,
        pp_buffer_bytes=5,
        runtime_bytes=15,
        relative_error=relative_error,
        source=Source.ROOFLINE,
    )


def test_demand_is_the_upper_end_of_the_estimate() -> None:
    assert demand(memory(0.0)) == blocks(80, tp=2, pp=2, layer=107, first=50, last=60, fixed=30)
    # 10% more of each part, rounded up: 117.7, 55, 66 and 33 (floats leave 55 and 66 a hair above themselves).
    upper = demand(memory(0.1))
    assert (upper.layer_bytes, upper.fixed_bytes) == (118, 33)
    assert upper.first_stage_bytes in (55, 56)
    assert upper.last_stage_bytes in (66, 67)


@pytest.mark.parametrize("error", [-0.1, float("nan"), float("inf")])
def test_demand_refuses_an_error_that_is_none(error: float) -> None:
    with pytest.raises(ConfigError, match="relative error"):
        demand(memory(error))


def test_the_papers_uneven_split() -> None:
    """Falcon-7B's 32 layers at pp=4 on what 20 other models left over (paper, section 8.5): 10, 9, 7, 6."""
    left_over = cluster(gpu(0, 105), gpu(1, 99), gpu(2, 70), gpu(3, 69))
    assert placed(blocks(32, pp=4), left_over).layers_per_stage == (10, 9, 7, 6)


@pytest.mark.parametrize(
    ("wanted", "frees", "layers"),
    [
        pytest.param(blocks(8, pp=4), (20, 20, 20, 20), (2, 2, 2, 2), id="even-exactly-full"),
        pytest.param(blocks(8, pp=4), (500, 500, 500, 500), (2, 2, 2, 2), id="even-with-slack"),
        pytest.param(blocks(10, pp=4), (500, 500, 500, 500), (3, 3, 2, 2), id="longer-stages-first"),
        pytest.param(blocks(10, pp=4), (29, 500, 500, 500), (2, 3, 3, 2), id="a-short-room-gets-a-short-stage"),
        pytest.param(blocks(8, pp=2), (50, 30), (5, 3), id="as-even-as-memory-allows"),
        pytest.param(blocks(8, pp=2, first=10), (50, 41), (4, 4), id="the-roomier-takes-the-embedding"),
        pytest.param(blocks(8, pp=2, first=10), (41, 50), (4, 4), id="whichever-it-is"),
        pytest.param(blocks(2, pp=2, last=100), (130, 20), (1, 1), id="the-head-goes-where-it-fits"),
        pytest.param(blocks(3, pp=1, first=5, last=6, fixed=7), (48,), (3,), id="one-stage-holds-both-ends"),
    ],
)
def test_splits(wanted: BlockDemand, frees: tuple[int, ...], layers: tuple[int, ...]) -> None:
    answer = placed(wanted, cluster(*(gpu(i, free) for i, free in enumerate(frees))))
    assert answer.layers_per_stage == layers


def test_a_full_gpu_is_skipped() -> None:
    answer = placed(blocks(4, pp=2), cluster(gpu(0, 30), gpu(1, 3), gpu(2, 30)))
    assert answer.device_ids == ("a0", "a2")


def test_an_even_split_elsewhere_is_better_than_an_uneven_one_on_preferred_gpus() -> None:
    """The pipeline is as slow as its longest stage; the idle GPU with room for one layer is left out."""
    answer = placed(blocks(4, pp=2), cluster(gpu(0, 10), gpu(1, 90, load=0.1), gpu(2, 90, load=0.2)))
    assert answer.device_ids == ("a1", "a2")


def test_a_tp_group_stays_on_one_node() -> None:
    """Three GPUs have room, but only node b has two of them."""
    spread = cluster(gpu(0, 50), gpu(1, 5), gpu(0, 50, node="b"), gpu(1, 50, node="b"))
    assert placed(blocks(5, tp=2), spread).device_ids == ("b0", "b1")
    assert isinstance(fit(blocks(5, tp=2), cluster(gpu(0, 50), gpu(0, 50, node="b")), LeastLoaded()), Refusal)


def test_the_sorted_grouping_is_found_when_neighbours_do_not_do() -> None:
    """(0, 1), (2, 3) would each have a member with 10 bytes; (0, 2), (1, 3) fit both stages."""
    crossed = cluster(gpu(0, 50), gpu(1, 20), gpu(2, 50), gpu(3, 20))
    answer = placed(blocks(7, tp=2, pp=2), crossed)
    assert {frozenset(stage.device_ids) for stage in answer.stages} == {
        frozenset({"a0", "a2"}),
        frozenset({"a1", "a3"}),
    }
    assert answer.layers_per_stage == (5, 2)


def test_tp_groups_keep_to_link_pairs() -> None:
    """The pair (2, 3) is chosen over 1 and 2 when GPU 0 is full; without links, the first by index are."""
    first_full = cluster(gpu(0, 0), gpu(1, 90), gpu(2, 90), gpu(3, 90))
    assert placed(blocks(4, tp=2), first_full).device_ids == ("a1", "a2")
    assert placed(blocks(4, tp=2), first_full, link_group_size=2).device_ids == ("a2", "a3")


def test_links_are_given_up_before_the_deployment_is() -> None:
    only_across = cluster(gpu(0, 0), gpu(1, 90), gpu(2, 90), gpu(3, 0))
    assert placed(blocks(4, tp=2), only_across, link_group_size=2).device_ids == ("a1", "a2")


def test_stages_of_one_node_are_neighbours_in_the_pipeline() -> None:
    two_nodes = cluster(
        gpu(0, 90), gpu(1, 90, load=0.3), gpu(0, 90, node="b", load=0.1), gpu(1, 90, node="b", load=0.2)
    )
    assert [s.node_id for s in placed(blocks(4, pp=4), two_nodes).stages] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("wanted", "snapshot", "numbers", "shortfall", "missing"),
    [
        pytest.param(
            blocks(10, layer=GIB),
            cluster(gpu(0, 4 * GIB, total_bytes=8 * GIB)),
            ("10.00 GiB", "4.00 GiB"),
            6 * GIB,
            0,
            id="one-gpu",
        ),
        pytest.param(
            blocks(8, pp=2), cluster(gpu(0, 30), gpu(1, 31)), ("6 of 8 layers", "2 GPUs"), 10, 0, id="two-stages"
        ),
        pytest.param(
            blocks(4, pp=3, first=50, last=50),
            cluster(gpu(0, 100), gpu(1, 59), gpu(2, 59)),
            ("of 4 layers", "3 GPUs"),
            1,  # 60 bytes hold an end and a layer; there are two ends and one GPU that holds either
            0,
            id="no-room-for-both-ends",
        ),
        pytest.param(
            blocks(8, tp=2), cluster(gpu(0, 90)), ("needs 2 GPUs", "there are 0"), 80, 2, id="too-few-gpus"
        ),
        pytest.param(blocks(2, pp=3), cluster(gpu(0, 90)), ("3 layers", "has 2"), 0, 0, id="too-few-layers"),
        pytest.param(blocks(1), cluster(), ("needs 1 GPUs", "there are 0"), 10, 1, id="no-gpu-at-all"),
    ],
)
def test_refusals_say_both_numbers_and_what_is_missing(
    wanted: BlockDemand, snapshot: ClusterSnapshot, numbers: tuple[str, ...], shortfall: int, missing: int
) -> None:
    answer = refused(wanted, snapshot)
    for number in numbers:
        assert number in answer.reason
    assert (answer.shortfall_bytes, answer.missing_gpus) == (shortfall, missing)


@given(wanted=demands(), snapshot=snapshots())
def test_the_shortfall_is_exactly_what_is_missing(wanted: BlockDemand, snapshot: ClusterSnapshot) -> None:
    answer = fit(wanted, snapshot, Packing())
    if isinstance(answer, Placement) or answer.missing_gpus or wanted.pp > wanted.num_layers:
        return
    assert answer.shortfall_bytes > 0
    assert brute_force_fits(wanted, with_more_memory(snapshot, answer.shortfall_bytes))
    assert not brute_force_fits(wanted, with_more_memory(snapshot, answer.shortfall_bytes - 1))


@given(wanted=demands(), snapshot=snapshots(), data=st.data())
def test_more_free_memory_never_turns_a_placement_into_a_refusal(
    wanted: BlockDemand, snapshot: ClusterSnapshot, data: st.DataObject
) -> None:
    if isinstance(fit(wanted, snapshot, Hybrid()), Placement):
        roomier = ClusterSnapshot(
            tuple(replace(one, free_bytes=one.free_bytes + data.draw(st.integers(0, 10))) for one in snapshot.gpus)
        )
        assert isinstance(fit(wanted, roomier, Hybrid()), Placement)


@given(wanted=demands(), snapshot=snapshots())
def test_the_longest_stage_is_as_short_as_any_placement_allows(
    wanted: BlockDemand, snapshot: ClusterSnapshot
) -> None:
    answer = fit(wanted, snapshot, Packing())
    if isinstance(answer, Placement):
        assert not brute_force_fits(wanted, snapshot, longest=max(answer.layers_per_stage) - 1)


@given(wanted=demands(), snapshot=snapshots())
def test_no_other_choice_of_gpus_is_preferred(wanted: BlockDemand, snapshot: ClusterSnapshot) -> None:
    """Among all GPUs that do with stages as short: the worst-ranked one is ranked best, then the second worst."""
    policy = Packing()
    answer = fit(wanted, snapshot, policy)
    if not isinstance(answer, Placement):
        return
    rank = {one.device_id: position for position, one in enumerate(policy.tiers(snapshot.gpus)[0])}
    longest = max(answer.layers_per_stage)
    choices = [
        sorted((rank[one.device_id] for one in choice), reverse=True)
        for choice in combinations(snapshot.gpus, wanted.tp * wanted.pp)
        if brute_force_fits(wanted, ClusterSnapshot(choice), longest)
    ]
    assert sorted((rank[device_id] for device_id in answer.device_ids), reverse=True) == min(choices)


@given(capacities=st.lists(st.integers(0, 12), min_size=1, max_size=6), num_layers=st.integers(1, 40))
def test_split_layers_is_within_capacity_and_as_even_as_that_allows(
    capacities: list[int], num_layers: int
) -> None:
    split = split_layers(num_layers, capacities)
    possible = min(capacities) >= 1 and sum(capacities) >= num_layers >= len(capacities)
    assert (split is not None) == possible
    if split is not None:
        assert sum(split) == num_layers
        assert all(1 <= n <= c for n, c in zip(split, capacities, strict=True))
        below = [n for n, c in zip(split, capacities, strict=True) if n < c]
        assert all(max(split) - n <= 1 for n in below), "a stage is shorter only where its room ends"


@given(pp=st.integers(1, 8), num_layers=st.integers(8, 130))
def test_split_layers_without_a_bound_is_the_even_split(pp: int, num_layers: int) -> None:
    assert split_layers(num_layers, [num_layers] * pp) == even_split(num_layers, pp)


def test_one_placer_answers_for_many_demands() -> None:
    snapshot = cluster(gpu(0, 30), gpu(1, 30), gpu(2, 5))
    placer = Placer(snapshot, Hybrid())
    for wanted in (blocks(2), blocks(9, pp=2), blocks(5, pp=2), blocks(2, tp=2), blocks(2)):
        assert placer.fit(wanted) == fit(wanted, snapshot, Hybrid())


@pytest.mark.parametrize("wanted", [blocks(8, pp=2), blocks(8, tp=2, pp=4), blocks(8, tp=4)])
def test_on_many_gpus_only_the_first_that_do_are_looked_at(
    wanted: BlockDemand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan asks for hundreds of configurations, and for each replica anew."""
    placer = Placer(cluster(*(gpu(i, 100, node=f"n{i // 8}") for i in range(1024))), Packing())
    placer.fit(blocks(1))
    looked_at = 0
    by_room = placement.fit._by_room

    def counted(order: list[Any]) -> list[Any]:
        nonlocal looked_at
        looked_at += len(order)
        return by_room(order)

    monkeypatch.setattr(placement.fit, "_by_room", counted)
    found = placer.fit(wanted)
    assert isinstance(found, Placement)
    number = wanted.tp * wanted.pp
    assert sorted(found.device_ids) == [f"n0{i}" for i in range(number)]
    assert looked_at <= 4 * number


def test_nodes_may_call_their_devices_alike() -> None:
    """Every node's first CPU share is ``cpu:0``: only with the node is the name one device's."""
    shares = [
        GpuState(device_id="cpu:0", node_id=node, gpu_index=0, total_bytes=50, free_bytes=50)
        for node in ("a", "b")
    ]
    answer = fit(blocks(10, pp=2), cluster(*shares), LeastLoaded())
    assert isinstance(answer, Placement), answer
    assert {(stage.node_id, stage.device_ids) for stage in answer.stages} == {("a", ("cpu:0",)), ("b", ("cpu:0",))}


@pytest.mark.parametrize(
    ("snapshot", "complaint"),
    [
        (cluster(gpu(0, 5), gpu(0, 7)), "a0 is listed twice"),
        (cluster(gpu(0, 5, load=float("nan"))), "load of nan"),
        (cluster(gpu(0, 5, load=1.5)), "load of 1.5"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(snapshot: ClusterSnapshot, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fit(blocks(1), snapshot, Hybrid())


@pytest.mark.parametrize(
    "wanted", [blocks(0), blocks(1, tp=0), blocks(1, layer=-1), blocks(1, fixed=-1), blocks(1, pp=0)]
)
def test_a_demand_that_is_none_is_refused(wanted: BlockDemand) -> None:
    with pytest.raises(ConfigError, match="demand"):
        fit(wanted, cluster(gpu(0, 5)), Hybrid())


def test_a_gpu_never_has_more_free_than_it_has() -> None:
    lying = cluster(gpu(0, 10**9, total_bytes=20), gpu(1, -5))
    assert isinstance(fit(blocks(3), lying, Hybrid()), Refusal)
    assert isinstance(fit(blocks(2), lying, Hybrid()), Placement)


def linked_fits(wanted: BlockDemand, snapshot: ClusterSnapshot, size: int, longest: int) -> bool:
    """Return whether every TP group can lie in one link group: then each link group is a node of its own."""
    split = tuple(replace(one, node_id=f"{one.node_id}/{one.gpu_index // size}") for one in snapshot.gpus)
    return brute_force_fits(wanted, ClusterSnapshot(split), longest)


@given(wanted=demands(), snapshot=snapshots(), size=st.sampled_from([2, 3, 4]))
def test_tp_groups_keep_to_link_groups_where_that_costs_no_evenness(
    wanted: BlockDemand, snapshot: ClusterSnapshot, size: int
) -> None:
    answer = fit(wanted, snapshot, Packing(), link_group_size=size)
    if not isinstance(answer, Placement):
        return
    group_of = {one.device_id: (one.node_id, one.gpu_index // size) for one in snapshot.gpus}
    linked = all(len({group_of[device] for device in stage.device_ids}) == 1 for stage in answer.stages)
    if wanted.tp > 1 and linked_fits(wanted, snapshot, size, max(answer.layers_per_stage)):
        assert linked
    assert not brute_force_fits(wanted, snapshot, longest=max(answer.layers_per_stage) - 1)


def evenest(wanted: BlockDemand, snapshot: ClusterSnapshot, used: tuple[str, ...]) -> list[int]:
    """The most even split over the GPUs ``used``, by trying every order of every grouping of them."""
    gpus = {one.device_id: one for one in snapshot.gpus}
    best: list[int] | None = None
    for order in permutations(used):
        groups = [[gpus[d] for d in order[i : i + wanted.tp]] for i in range(0, len(order), wanted.tp)]
        if any(len({one.node_id for one in group}) > 1 for group in groups):
            continue
        rooms = [min(one.free_bytes for one in group) for group in groups]
        for layers in product(range(1, wanted.num_layers + 1), repeat=wanted.pp):
            if sum(layers) == wanted.num_layers and all(
                wanted.stage_bytes(stage, n) <= room
                for stage, (n, room) in enumerate(zip(layers, rooms, strict=True))
            ):
                split = sorted(layers, reverse=True)
                best = split if best is None or split < best else best
    assert best is not None
    return best


@given(wanted=demands(), snapshot=snapshots())
def test_no_order_of_the_chosen_gpus_splits_more_evenly(wanted: BlockDemand, snapshot: ClusterSnapshot) -> None:
    answer = fit(wanted, snapshot, Packing())
    if isinstance(answer, Placement) and wanted.tp * wanted.pp <= 4:
        found = sorted(answer.layers_per_stage, reverse=True)
        assert found == evenest(wanted, snapshot, answer.device_ids)


@pytest.mark.parametrize("policy", [Hybrid(0.5), LeastLoaded(), Packing()])
@pytest.mark.parametrize("link_group_size", [None, 2])
@given(first=demands(), second=demands(), asked_before=st.booleans(), snapshot=snapshots())
def test_without_gpus_it_is_as_on_a_cluster_that_lacks_them(
    policy, link_group_size, first, second, asked_before: bool, snapshot: ClusterSnapshot
) -> None:
    """Twice over, and whichever tiers were looked at."""
    whole, left = Placer(snapshot, policy, link_group_size=link_group_size), snapshot
    if asked_before:
        whole.fit(second)
    answer, rest = whole.fit(first), whole
    while isinstance(answer, Placement):
        gone = {(stage.node_id, device) for stage in answer.stages for device in stage.device_ids}
        left = ClusterSnapshot(tuple(g for g in left.gpus if (g.node_id, g.device_id) not in gone))
        rest = rest.without(answer)
        anew = Placer(left, policy, link_group_size=link_group_size)
        assert rest.fit(second) == anew.fit(second)
        answer = rest.fit(first)
        assert answer == anew.fit(first)
    assert whole.fit(first) == Placer(snapshot, policy, link_group_size=link_group_size).fit(first)
