"""Cost of sharing, by the fast evaluator."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.load_model import LoadedCluster, Tenant, shares, slowdown, stretch
from placement.types import ClusterSnapshot
from tests.placement.fleets import fleet, fleets, place, serving


@pytest.mark.parametrize(("load", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 4.0), (0.95, 20.0), (1.95, 420.0)])
def test_stretch_by_hand(load: float, expected: float) -> None:
    """Mean sojourn of processor sharing; past 0.95 the tangent, whose slope there is 1 / 0.05**2."""
    assert stretch(load) == pytest.approx(expected)


@given(st.floats(0, 3), st.floats(0, 3))
def test_more_load_is_never_faster(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 1.0 <= stretch(low) <= stretch(high) < math.inf


def test_a_group_is_as_slow_as_its_slowest_gpu_and_stages_add_up() -> None:
    """Two stages take half the step each: one alone with 0.2 * 0.5, one with a load of 0.4."""
    cluster = LoadedCluster.of(
        fleet(4, serving("a", place(0, 1, pp=2), busy=0.2), serving("b", place(1, 2), busy=0.4))
    )
    a = Tenant(0.2, shares(place(0, 1, pp=2)))
    assert slowdown(a, cluster.loads) == pytest.approx(0.5 / 0.9 + 0.5 / 0.5)
    b = Tenant(0.4, shares(place(1, 2)))
    assert slowdown(b, cluster.loads) == pytest.approx(2.0)
    assert cluster.standing_cost(0.1) == pytest.approx(0.2 * (0.5 / 0.9 + 1.0) + 0.4 * 2.0 + 3 * 0.1)


@given(snapshot=fleets(), busy=st.floats(0, 1.2), price=st.floats(0.01, 1))
def test_what_adding_costs_is_the_difference_of_the_whole(
    snapshot: ClusterSnapshot, busy: float, price: float
) -> None:
    cluster = LoadedCluster.of(snapshot)
    tenant = Tenant(busy, shares(place(0, 1)))
    before, rise = cluster.standing_cost(price), cluster.cost_of_adding(tenant, price)
    assert cluster.standing_cost(price) == pytest.approx(before)
    cluster.put("new", tenant)
    assert cluster.standing_cost(price) == pytest.approx(before + rise)


@given(snapshot=fleets().filter(lambda s: s.deployments), price=st.floats(0.01, 1))
def test_what_a_move_saves_is_the_difference_of_the_whole(snapshot: ClusterSnapshot, price: float) -> None:
    cluster = LoadedCluster.of(snapshot)
    deployment = snapshot.deployments[0]
    replica = deployment.replicas[0]
    tenant = Tenant(deployment.busy_fraction, shares(replica.placement))
    target = Tenant(deployment.busy_fraction, shares(place(2, 3)))
    before = cluster.standing_cost(price)
    saved = cluster.saved_by_taking(replica.replica_id, tenant, price) - cluster.cost_of_adding(target, price)
    cluster.put(replica.replica_id, target)
    assert cluster.standing_cost(price) == pytest.approx(before - saved)
