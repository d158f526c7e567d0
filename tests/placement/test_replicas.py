"""Several replicas, each on GPUs of its own: laws, and refusals whose numbers are true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.fit import Placer
from placement.placer_registry import make_placer
from placement.policies import ILP, POLICIES, Hybrid
from placement.replicas import ReplicaPlacer, Replicas
from placement.types import BlockDemand, ClusterSnapshot, Placement, Refusal
from tests.golden_words import Golden
from tests.placement.clusters import (
    blocks,
    check_placement,
    cluster,
    demands,
    gpu,
    snapshots,
    with_more_memory,
)

COUNTS = st.integers(1, 4)


def placer(snapshot: ClusterSnapshot) -> Placer:
    return Placer(snapshot, Hybrid())


def replicas(demand: BlockDemand, count: int, snapshot: ClusterSnapshot) -> Replicas | Refusal:
    return ReplicaPlacer(snapshot, count, placer).fit(demand)


def most_of_one_stage(demand: BlockDemand, snapshot: ClusterSnapshot) -> int:
    """Return how many groups of tp GPUs of one node have room for all of it."""
    need = demand.stage_bytes(0, demand.num_layers)
    nodes = [one.node_id for one in snapshot.gpus if one.free_bytes >= need]
    return sum(nodes.count(node) // demand.tp for node in set(nodes))


@given(demand=demands(), count=COUNTS, snapshot=snapshots())
def test_each_has_a_place_of_its_own(demand: BlockDemand, count: int, snapshot: ClusterSnapshot) -> None:
    answer = replicas(demand, count, snapshot)
    if isinstance(answer, Replicas):
        assert len(answer.placements) == count
        for placement in answer.placements:
            check_placement(placement, demand, snapshot)
        used = [device for placement in answer.placements for device in placement.device_ids]
        assert len(set(used)) == len(used)
        assert answer.layers_per_stage == answer.placements[0].layers_per_stage


@given(demand=demands().filter(lambda d: d.pp == 1), count=COUNTS, snapshot=snapshots())
def test_those_of_one_stage_fit_exactly_when_there_are_groups_for_all(
    demand: BlockDemand, count: int, snapshot: ClusterSnapshot
) -> None:
    fits = isinstance(replicas(demand, count, snapshot), Replicas)
    assert fits == (most_of_one_stage(demand, snapshot) >= count)


@given(demand=demands(), count=COUNTS, sizes=st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_on_gpus_that_are_alike_they_fit_exactly_when_there_are_groups_for_all(
    demand: BlockDemand, count: int, sizes: list[int]
) -> None:
    gpus = [gpu(i, 1000, node=f"n{node}") for node, number in enumerate(sizes) for i in range(number)]
    groups = sum(number // demand.tp for number in sizes)
    fits = isinstance(replicas(demand, count, ClusterSnapshot(tuple(gpus))), Replicas)
    assert fits == (groups >= count * demand.pp and demand.pp <= demand.num_layers)


@given(demand=demands(), snapshot=snapshots())
def test_one_goes_where_it_would_go_alone(demand: BlockDemand, snapshot: ClusterSnapshot) -> None:
    alone, answer = placer(snapshot).fit(demand), replicas(demand, 1, snapshot)
    if isinstance(alone, Placement):
        assert answer == Replicas((alone,))
    else:
        assert isinstance(answer, Refusal)


@given(demand=demands(), count=COUNTS, snapshot=snapshots())
def test_the_first_of_several_go_where_fewer_would(
    demand: BlockDemand, count: int, snapshot: ClusterSnapshot
) -> None:
    more, fewer = replicas(demand, count + 1, snapshot), replicas(demand, count, snapshot)
    if isinstance(more, Replicas):
        assert fewer == Replicas(more.placements[:-1])


@given(demand=demands().filter(lambda d: d.pp <= d.num_layers), count=COUNTS, snapshot=snapshots())
def test_what_a_refusal_asks_for_would_do(demand: BlockDemand, count: int, snapshot: ClusterSnapshot) -> None:
    """So much more on each GPU, and so many further ones with that much."""
    answer = replicas(demand, count, snapshot)
    if not isinstance(answer, Refusal):
        return

    def with_more(extra_bytes: int) -> Replicas | Refusal:
        further = tuple(gpu(i, extra_bytes, node="further") for i in range(answer.missing_gpus))
        larger = with_more_memory(snapshot, extra_bytes)
        return replicas(demand, count, ClusterSnapshot(larger.gpus + further))

    assert isinstance(with_more(answer.shortfall_bytes), Replicas), answer
    if demand.pp == 1 and answer.shortfall_bytes > 0:
        assert isinstance(with_more(answer.shortfall_bytes - 1), Refusal), answer


@pytest.mark.parametrize("policy", [*POLICIES, ILP])
def test_every_policy_places_the_next_on_what_is_left_and_stops_when_nothing_is(policy: str) -> None:
    demand, snapshot = blocks(4, layer=10), cluster(gpu(0, 40), gpu(1, 90), gpu(2, 39))

    def fit(count: int) -> Replicas | Refusal:
        return ReplicaPlacer(snapshot, count, lambda left: make_placer(policy, left)).fit(demand)

    both = fit(2)
    assert isinstance(both, Replicas)
    assert sorted(p.device_ids for p in both.placements) == [("a0",), ("a1",)]
    third, fourth = fit(3), fit(4)
    assert isinstance(third, Refusal)
    assert isinstance(fourth, Refusal)
    assert (third.shortfall_bytes, third.missing_gpus) == (1, 0)
    assert (fourth.shortfall_bytes, fourth.missing_gpus) == (40, 1)


def test_a_refusal_says_how_many_fit_and_what_all_take(golden: Golden) -> None:
    snapshot = cluster(*(gpu(i, 2**30, total_bytes=2**31) for i in range(3)))
    of_two = blocks(2, tp=2, layer=2**29)
    answer = replicas(of_two, 2, snapshot)
    assert isinstance(answer, Refusal)
    golden("planning", answer.reason)
    answer = replicas(blocks(2, layer=2**30), 3, snapshot)
    assert isinstance(answer, Refusal)
    golden("planning", answer.reason)
    uneven = cluster(gpu(0, 2**31, total_bytes=2**31), gpu(1, 2**30, total_bytes=2**31))
    answer = replicas(blocks(2, layer=2**30), 2, uneven)
    assert isinstance(answer, Refusal)
    golden("planning", answer.reason)


def test_none_at_all_is_refused(golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        ReplicaPlacer(cluster(), 0, placer)
