"""Conformance suite of placement policies.

class TestMine(PolicyConformance):
    policy = Mine()
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placement.fit import Placer, fit
from placement.placer_registry import check_placement as check_name
from placement.placer_registry import make_placer
from placement.policies import POLICIES, NamedPolicy, make_policy
from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement, Refusal
from tests.placement.clusters import (
    blocks,
    brute_force_fits,
    check_placement,
    cluster,
    demands,
    gpu,
    permuted,
    snapshots,
)

# One law, several subclasses: they differ in ``policy`` alone, which is a constant.
law = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


class PolicyConformance:
    """Laws of any policy: it orders, it never decides feasibility, and nothing depends on the order of a list."""

    policy: ClassVar[NamedPolicy]

    def test_it_is_registered_under_its_name(self) -> None:
        assert POLICIES[self.policy.name] is type(self.policy)
        assert type(make_policy(self.policy.name)) is type(self.policy)

    def test_its_name_makes_a_placer(self) -> None:
        # The name is what the command line, the API and the settings are given.
        check_name(self.policy.name, sees_load=False)
        placer = make_placer(self.policy.name, cluster(gpu(0, 90, load=0.4), gpu(1, 90)))
        assert isinstance(placer, Placer)
        assert isinstance(placer.fit(blocks(2)), Placement)

    def test_it_says_where_it_places(self) -> None:
        assert self.policy.places_on.strip()

    @law
    @given(snapshot=snapshots())
    def test_tiers_hold_every_gpu_once(self, snapshot: ClusterSnapshot) -> None:
        listed = [gpu.device_id for tier in self.policy.tiers(snapshot.gpus) for gpu in tier]
        assert sorted(listed) == sorted(gpu.device_id for gpu in snapshot.gpus)

    @law
    @given(snapshot=snapshots(), data=st.data())
    def test_tiers_ignore_the_order_of_the_snapshot(self, snapshot: ClusterSnapshot, data: st.DataObject) -> None:
        other = permuted(data, snapshot)
        assert self.policy.tiers(other.gpus) == self.policy.tiers(snapshot.gpus)

    @law
    @given(demand=demands(), snapshot=snapshots(), link=st.sampled_from([None, 1, 2, 4]))
    def test_places_exactly_when_some_placement_exists(
        self, demand: BlockDemand, snapshot: ClusterSnapshot, link: int | None
    ) -> None:
        answer = fit(demand, snapshot, self.policy, link_group_size=link)
        if brute_force_fits(demand, snapshot):
            assert isinstance(answer, Placement)
        else:
            assert isinstance(answer, Refusal)

    @law
    @given(demand=demands(), snapshot=snapshots(), link=st.sampled_from([None, 1, 2, 4]))
    def test_no_gpu_is_over_filled_and_every_layer_placed_once_in_order(
        self, demand: BlockDemand, snapshot: ClusterSnapshot, link: int | None
    ) -> None:
        answer = fit(demand, snapshot, self.policy, link_group_size=link)
        if isinstance(answer, Placement):
            check_placement(answer, demand, snapshot)

    @law
    @given(demand=demands(), snapshot=snapshots(), data=st.data())
    def test_the_order_of_nodes_and_gpus_never_matters(
        self, demand: BlockDemand, snapshot: ClusterSnapshot, data: st.DataObject
    ) -> None:
        other = permuted(data, snapshot)
        assert fit(demand, other, self.policy) == fit(demand, snapshot, self.policy)

    @law
    @given(demand=demands(), snapshot=snapshots(), more_bytes=st.integers(1, 30), load=st.floats(0, 1))
    def test_one_more_gpu_never_turns_a_placement_into_a_refusal(
        self, demand: BlockDemand, snapshot: ClusterSnapshot, more_bytes: int, load: float
    ) -> None:
        if isinstance(fit(demand, snapshot, self.policy), Placement):
            extra = GpuState(
                device_id="extra",
                node_id="a",
                gpu_index=99,
                total_bytes=40,
                free_bytes=more_bytes,
                load_fraction=load,
            )
            assert isinstance(fit(demand, ClusterSnapshot((*snapshot.gpus, extra)), self.policy), Placement)
