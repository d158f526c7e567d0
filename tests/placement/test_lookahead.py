"""Places that look-ahead chooses for a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.fit import fit
from placement.load_model import LoadedCluster, Tenant, shares
from placement.lookahead import LookAhead, expected_busy_fraction
from placement.policies import POLICIES, make_policy
from placement.types import BlockDemand, ClusterSnapshot, Placement, Refusal
from tests.placement.clusters import blocks, check_placement, demands
from tests.placement.fleets import fleet, fleets, place, serving


@settings(max_examples=150)
@given(demand=demands(), snapshot=fleets(), busy=st.floats(0, 1), price=st.floats(0.01, 1))
def test_it_places_what_fits_and_never_dearer_than_a_plain_order(
    demand: BlockDemand, snapshot: ClusterSnapshot, busy: float, price: float
) -> None:
    found = LookAhead(snapshot, gpu_price=price, busy_fraction=busy).fit(demand)
    plain = [fit(demand, snapshot, make_policy(name)) for name in POLICIES]
    if isinstance(found, Refusal):
        assert all(isinstance(answer, Refusal) for answer in plain)
        return
    check_placement(found, demand, snapshot)

    def cost(placement: Placement) -> float:
        cluster = LoadedCluster.of(snapshot)
        cluster.put("new", Tenant(busy, shares(placement)))
        return cluster.standing_cost(price)

    for answer in plain:
        assert isinstance(answer, Placement)
        assert cost(found) <= cost(answer) + 1e-9


@pytest.mark.parametrize(
    ("crowd", "price", "device"),
    [(0.1, 0.25, "g0"), (0.6, 0.25, "g1"), (0.6, 100.0, "g0"), (0.1, 0.001, "g1")],
)
def test_a_gpu_is_opened_when_it_saves_more_requests_than_its_price(
    crowd: float, price: float, device: str
) -> None:
    """Sharing with 0.1, 0.3 costs 0.4 / 0.6 = 0.667 requests instead of 0.3 / 0.7 + 0.1 / 0.9 = 0.540: 0.127 more.

    Sharing with 0.6, it costs 9 instead of 1.93.
    """
    snapshot = fleet(2, serving("a", place(0), busy=crowd))
    found = LookAhead(snapshot, gpu_price=price, busy_fraction=0.3).fit(blocks(1))
    assert isinstance(found, Placement)
    assert found.device_ids == (device,)


def test_of_full_gpus_the_quieter_one_is_joined() -> None:
    """Packing would join the fuller one."""
    snapshot = fleet(2, serving("a", place(0, size_bytes=50), busy=0.6), serving("b", place(1), busy=0.1))
    found = LookAhead(snapshot, busy_fraction=0.2).fit(blocks(1))
    assert isinstance(found, Placement)
    assert found.device_ids == ("g1",)


def test_any_score_may_take_the_load_models_place() -> None:
    snapshot = fleet(2, serving("a", place(0), busy=0.1))
    found = LookAhead(snapshot, score=lambda placement: float(placement.device_ids == ("g0",))).fit(blocks(1))
    assert isinstance(found, Placement)
    assert found.device_ids == ("g1",)


def test_an_unknown_model_is_expected_to_be_as_busy_as_the_others() -> None:
    snapshot = fleet(4, serving("a", place(0), place(1), busy=0.2), serving("b", place(2), busy=0.8))
    assert expected_busy_fraction(snapshot) == pytest.approx(0.4)
    assert expected_busy_fraction(fleet(1)) == 0.5
