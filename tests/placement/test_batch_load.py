"""The load of workers that batch: closed forms, a chain solved as linear equations, and laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import exp, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.batch_load import Batching, mean_speed, settle

ALONE, BESIDE = ((1.0, (("n", "g0"),)),), ((0.5, (("n", "g0"),)), (0.5, (("n", "g1"),)))
SHARES = st.lists(st.floats(0, 1), max_size=5)


def batching(
    rate: float, alone_s: float = 2.0, full_s: float = 6.0, slots: int = 8, batches: int = 1, stages=ALONE
) -> Batching:
    return Batching(rate, alone_s, full_s, slots, batches, stages)


@st.composite
def tenants(draw: st.DrawFn) -> Batching:
    alone_s, slots = draw(st.floats(0.1, 4)), draw(st.integers(1, 40))
    return batching(
        draw(st.floats(0, 3)),
        alone_s,
        alone_s * (1 + draw(st.floats(0, 1)) * (slots - 1)),
        slots,
        draw(st.sampled_from([1, 1, 2, 4])),
        draw(st.sampled_from([ALONE, BESIDE])),
    )


TENANTS = tenants()


@pytest.mark.parametrize("utilisation", [0.0, 0.1, 0.5, 0.9])
def test_with_one_slot_it_is_the_queue_of_one_at_a_time(utilisation: float) -> None:
    one = batching(utilisation / 2.0, alone_s=2.0, full_s=2.0, slots=1)
    assert one.under_way(1.0) == pytest.approx(utilisation)


@pytest.mark.parametrize("offered", [0.01, 1.0, 20.0, 900.0])
def test_where_a_batch_costs_nothing_any_number_stay_as_long_as_one(offered: float) -> None:
    """M/G/infinity: Poisson, its mean rate times stay. The last has larger weights than a float has room for."""
    many = batching(offered / 2.0, alone_s=2.0, full_s=2.0, slots=4000)
    assert many.under_way(1.0) == pytest.approx(1 - exp(-offered))


def solved(tenant: Batching, slowed: float, states: int = 1500) -> float:
    """Batches under way by the chain's balance, state by state."""
    per_slot = (tenant.full_s - tenant.alone_s) / (tenant.slots - 1) if tenant.slots > 1 else 0.0
    weights = [0.0]  # logarithms
    for n in range(1, states):
        running = min(n, tenant.slots)
        flying = min(running, tenant.batches)
        stay_s = slowed * (tenant.alone_s + max(0.0, per_slot) * (running / flying - 1))
        weights.append(weights[-1] + np.log(tenant.requests_per_s * stay_s / running))
    chances = np.exp(np.array(weights) - max(weights))
    chances /= chances.sum()
    n = np.arange(states)
    return float(chances @ np.minimum(n, min(tenant.batches, tenant.slots)))


def saturation(tenant: Batching) -> float:
    batches = min(tenant.batches, tenant.slots)
    per_slot = max(0.0, tenant.full_s - tenant.alone_s) / max(1, tenant.slots - 1)
    return tenant.requests_per_s * (tenant.alone_s + per_slot * (tenant.slots / batches - 1)) / tenant.slots


@given(tenant=TENANTS, slowed=st.floats(1, 4))
def test_it_is_the_birth_and_death_chain(tenant: Batching, slowed: float) -> None:
    if saturation(tenant) * slowed >= 1:
        assert tenant.under_way(slowed) == min(tenant.batches, tenant.slots)
    elif tenant.requests_per_s > 1e-6 and saturation(tenant) * slowed <= 0.95:
        assert tenant.under_way(slowed) == pytest.approx(solved(tenant, slowed), rel=1e-6)


@given(tenant=TENANTS, slowed=st.floats(1, 4), more=st.floats(1, 2))
def test_slowed_it_is_no_less_busy_and_asks_for_no_more(tenant: Batching, slowed: float, more: float) -> None:
    fast, slow = tenant.under_way(slowed), tenant.under_way(slowed * more)
    assert 0 <= fast <= slow + 1e-6 <= tenant.batches + 1e-6
    assert slow / more <= fast + 1e-6


@given(tenant=TENANTS, seen=st.floats(0.01, 1))
def test_as_much_shorter_as_it_was_seen_less_busy(tenant: Batching, seen: float) -> None:
    part = tenant.share_seen(seen)
    assert 0 <= part <= 1
    assert tenant.under_way(part) <= seen or part == 0
    if part < 1:
        assert tenant.under_way(part + 2**-19) > seen


@given(running=SHARES, beside=st.integers(1, 3))
def test_the_mean_speed_is_over_who_runs(running: list[float], beside: int) -> None:
    expected = sum(
        prod(share if on else 1 - share for share, on in zip(running, who, strict=True)) / (beside + sum(who))
        for who in product((False, True), repeat=len(running))
    )
    assert mean_speed(running, beside) == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_who_is_asked_for_too_much_always_runs(count: int) -> None:
    assert settle({str(i): batching(100.0) for i in range(count)}) == {str(i): 1.0 for i in range(count)}


@given(several=st.lists(TENANTS, min_size=1, max_size=5), factor=st.floats(1, 3))
def test_more_of_one_makes_nobody_less_busy(several: list[Batching], factor: float) -> None:
    busier = replace(several[0], requests_per_s=several[0].requests_per_s * factor)
    before = settle({str(i): t for i, t in enumerate(several)})
    after = settle({str(i): t for i, t in enumerate([busier, *several[1:]])})
    for name, batches in before.items():
        assert batches <= after[name] + 1e-2


@given(several=st.lists(TENANTS, min_size=2, max_size=5))
def test_who_is_listed_first_is_never_a_reason(several: list[Batching]) -> None:
    named = {str(i): tenant for i, tenant in enumerate(several)}
    assert settle(named) == pytest.approx(settle(dict(reversed(named.items()))), abs=1e-2)


def test_a_batch_is_no_slower_than_one_after_the_other() -> None:
    """Whatever two estimates say that were made apart."""
    contradicted = batching(0.1, alone_s=0.5, full_s=8.0, slots=4)
    assert contradicted.under_way(1.0) == batching(0.1, alone_s=2.0, full_s=8.0, slots=4).under_way(1.0)


def test_a_lone_one_shares_with_who_joins() -> None:
    """On all its GPUs, one after the other or not."""
    for stages in ALONE, BESIDE:
        assert settle({"a": batching(0.5, stages=stages)}) == {"a": batching(0.5).under_way(2.0)}


@given(several=st.lists(TENANTS, min_size=1, max_size=5))
def test_it_comes_to_rest_where_nobody_moves_any_more(several: list[Batching]) -> None:
    """From where the map leads nowhere else, but for the 0.1% at which it is left."""
    named = {str(i): tenant for i, tenant in enumerate(several)}
    batches = settle(named)
    for name, tenant in named.items():
        slowed = 0.0
        for share, (key,) in tenant.stages:
            beside = [
                min(1.0, d * batches[other])
                for other in named
                if other != name
                for d, keys in named[other].stages
                if key in keys
            ]
            slowed += share / mean_speed(beside, 2)
        assert tenant.under_way(slowed / 1.0011) - 1e-9 <= batches[name] <= tenant.under_way(slowed) + 1e-9
