"""Placement policies: shared laws, and what each prefers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.fit import fit
from placement.policies import (
    DEFAULT_LOAD_THRESHOLD,
    DEFAULT_POLICY,
    POLICIES,
    Hybrid,
    LeastLoaded,
    Packing,
    make_policy,
)
from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement
from tests.golden_words import Golden
from tests.placement.clusters import blocks, cluster, demands, gpu, snapshots
from tests.placement.policy_conformance import PolicyConformance


class TestLeastLoaded(PolicyConformance):
    policy = LeastLoaded()

    @given(snapshot=snapshots(), need=st.integers(1, 30))
    def test_picks_the_least_loaded_of_those_with_room(self, snapshot: ClusterSnapshot, need: int) -> None:
        answer = fit(blocks(1, layer=need), snapshot, self.policy)
        loads = [one.load_fraction for one in snapshot.gpus if one.free_bytes >= need]
        if not loads:
            assert not isinstance(answer, Placement)
        else:
            assert isinstance(answer, Placement)
            assert load_of(snapshot, answer) == [min(loads)]

    def test_of_equals_the_emptiest_then_node_and_index(self) -> None:
        idle = cluster(gpu(1, 500), gpu(0, 500), gpu(0, 900, node="b"), gpu(2, 900))
        assert names(self.policy.tiers(idle.gpus)) == [["a2", "b0", "a0", "a1"]]

    def test_a_few_bytes_of_noise_are_no_reason(self) -> None:
        noisy = cluster(gpu(0, 951), gpu(1, 959))
        assert names(self.policy.tiers(noisy.gpus)) == [["a0", "a1"]]


class TestPacking(PolicyConformance):
    policy = Packing()

    @given(snapshot=snapshots(), need=st.integers(1, 30))
    def test_picks_the_most_loaded_of_those_with_room(self, snapshot: ClusterSnapshot, need: int) -> None:
        answer = fit(blocks(1, layer=need), snapshot, self.policy)
        loads = [one.load_fraction for one in snapshot.gpus if one.free_bytes >= need]
        if loads:
            assert isinstance(answer, Placement)
            assert load_of(snapshot, answer) == [max(loads)]

    def test_of_equals_the_fullest_first(self) -> None:
        idle = cluster(gpu(0, 900), gpu(1, 300), gpu(2, 900))
        assert names(self.policy.tiers(idle.gpus)) == [["a1", "a0", "a2"]]


class TestHybrid(PolicyConformance):
    policy = Hybrid()

    @given(demand=demands(), snapshot=snapshots())
    def test_equals_packing_when_nothing_is_loaded_to_the_threshold(
        self, demand: BlockDemand, snapshot: ClusterSnapshot
    ) -> None:
        calm = ClusterSnapshot(tuple(one for one in snapshot.gpus if one.load_fraction < self.policy.threshold))
        assert fit(demand, calm, self.policy) == fit(demand, calm, Packing())

    @given(demand=demands(), snapshot=snapshots())
    def test_equals_least_loaded_when_everything_is_loaded(
        self, demand: BlockDemand, snapshot: ClusterSnapshot
    ) -> None:
        busy = ClusterSnapshot(tuple(one for one in snapshot.gpus if one.load_fraction >= self.policy.threshold))
        assert fit(demand, busy, self.policy) == fit(demand, busy, LeastLoaded())

    @given(demand=demands(), snapshot=snapshots())
    def test_leaves_the_loaded_ones_alone_while_the_packable_ones_suffice(
        self, demand: BlockDemand, snapshot: ClusterSnapshot
    ) -> None:
        packable = ClusterSnapshot(
            tuple(one for one in snapshot.gpus if one.load_fraction < self.policy.threshold)
        )
        among_packable = fit(demand, packable, Packing())
        if isinstance(among_packable, Placement):
            assert fit(demand, snapshot, self.policy) == among_packable

    @pytest.mark.parametrize(
        ("free", "expected"),
        [
            pytest.param({"a0": 50, "a1": 50, "a2": 50, "a3": 50}, ("a1",), id="pack-the-highest-below-L"),
            pytest.param({"a0": 50, "a1": 0, "a2": 50, "a3": 50}, ("a0",), id="next-packable"),
            pytest.param({"a0": 0, "a1": 0, "a2": 50, "a3": 50}, ("a3",), id="least-loaded-of-the-rest"),
        ],
    )
    def test_where_one_model_goes(self, free: dict[str, int], expected: tuple[str, ...]) -> None:
        loads = {"a0": 0.05, "a1": 0.15, "a2": 0.9, "a3": DEFAULT_LOAD_THRESHOLD}
        gpus = [gpu(int(name[1]), free[name], load=loads[name]) for name in free]
        answer = fit(blocks(1, layer=50), cluster(*gpus), self.policy)
        assert isinstance(answer, Placement)
        assert answer.device_ids == expected

    def test_takes_both_kinds_together_when_neither_suffices(self) -> None:
        """Two stages, one packable GPU and two loaded ones of which only the busier has room."""
        mixed = cluster(gpu(0, 50, load=0.1), gpu(1, 0, load=0.6), gpu(2, 50, load=0.9))
        answer = fit(blocks(2, pp=2, layer=50), mixed, self.policy)
        assert isinstance(answer, Placement)
        assert answer.device_ids == ("a0", "a2")


def names(tiers: tuple[tuple[GpuState, ...], ...]) -> list[list[str]]:
    return [[one.device_id for one in tier] for tier in tiers]


def load_of(snapshot: ClusterSnapshot, placement: Placement) -> list[float]:
    loads = {one.device_id: one.load_fraction for one in snapshot.gpus}
    return [loads[device_id] for device_id in placement.device_ids]


def test_the_default_is_hybrid_at_a_fifth() -> None:
    assert DEFAULT_POLICY == "hybrid"
    assert make_policy() == Hybrid() == Hybrid(0.2)
    assert make_policy("hybrid", threshold=0.3) == Hybrid(0.3)
    assert list(POLICIES)[:3] == ["hybrid", "packing", "least-loaded"]


def test_every_policy_conforms() -> None:
    """Each line of the registry has a subclass of the suite, and each subclass a line."""
    assert sorted(kind.policy.name for kind in PolicyConformance.__subclasses__()) == sorted(POLICIES)


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("best-fit", None),
        ("packing", 0.5),
        ("hybrid", 1.5),
        ("hybrid", float("nan")),
    ],
)
def test_bad_policies_are_refused(name: str, threshold: float | None, golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        make_policy(name, threshold=threshold)
