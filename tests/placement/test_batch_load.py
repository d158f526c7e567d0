"""The load of workers that batch: closed forms, a chain solved as linear equations, and laws."""

from __future__ import annotations

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
    crowd = batching(utilisation / 2.0, alone_s=2.0, full_s=2.0, slots=1).crowd(1.0)
    assert crowd.batches == pytest.approx(utilisation)
    assert crowd.requests == pytest.approx(utilisation / (1 - utilisation))
    assert crowd.variance == pytest.approx(utilisation / (1 - utilisation) ** 2)


@pytest.mark.parametrize("offered", [0.01, 1.0, 20.0, 600.0])
def test_where_a_batch_costs_nothing_any_number_stay_as_long_as_one(offered: float) -> None:
    """M/G/infinity: Poisson with the mean rate times stay. The last has more states than a float has room for."""
    crowd = batching(offered / 2.0, alone_s=2.0, full_s=2.0, slots=2000).crowd(1.0)
    assert crowd.batches == pytest.approx(1 - exp(-offered))
    assert crowd.requests == pytest.approx(offered)
    assert crowd.variance == pytest.approx(offered)


def solved(tenant: Batching, slowed: float, states: int = 1500) -> tuple[float, float]:
    """Batches under way, and requests: the chain's balance equations, as long as it is worth."""
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
    return float(chances @ np.minimum(n, min(tenant.batches, tenant.slots))), float(chances @ n)


def saturation(tenant: Batching) -> float:
    batches = min(tenant.batches, tenant.slots)
    per_slot = max(0.0, tenant.full_s - tenant.alone_s) / max(1, tenant.slots - 1)
    return tenant.requests_per_s * (tenant.alone_s + per_slot * (tenant.slots / batches - 1)) / tenant.slots


@given(tenant=TENANTS, slowed=st.floats(1, 4))
def test_it_is_the_birth_and_death_chain(tenant: Batching, slowed: float) -> None:
    crowd = tenant.crowd(slowed)
    if tenant.requests_per_s < 1e-6:
        assert crowd.batches <= 1e-3
    elif saturation(tenant) * slowed <= 0.95:
        batches, requests = solved(tenant, slowed)
        assert crowd.batches == pytest.approx(batches, rel=1e-6)
        assert crowd.requests == pytest.approx(requests, rel=1e-6)
    elif saturation(tenant) * slowed >= 1:
        assert crowd.batches == min(tenant.batches, tenant.slots)


@given(tenant=TENANTS, slowed=st.floats(1, 4), more=st.floats(1, 2))
def test_slowed_it_is_no_less_busy_and_asks_for_no_more(tenant: Batching, slowed: float, more: float) -> None:
    fast, slow = tenant.crowd(slowed), tenant.crowd(slowed * more)
    assert 0 <= fast.batches <= slow.batches + 1e-6 <= tenant.batches + 1e-6
    assert slow.batches / more <= fast.batches + 1e-6
    assert fast.requests <= slow.requests * (1 + 1e-3) + 1e-9


@given(tenant=TENANTS, slowed=st.floats(1, 4))
def test_the_variance_is_how_the_number_grows(tenant: Batching, slowed: float) -> None:
    if saturation(tenant) * slowed < 0.9:
        by = 1e-5
        grown = tenant.crowd(slowed * (1 + by)).requests - tenant.crowd(slowed * (1 - by)).requests
        assert tenant.crowd(slowed).variance == pytest.approx(grown / (2 * by), rel=1e-3, abs=1e-6)


@given(running=SHARES, beside=st.integers(1, 3))
def test_the_mean_speed_is_over_who_runs(running: list[float], beside: int) -> None:
    expected = sum(
        prod(share if on else 1 - share for share, on in zip(running, who, strict=True)) / (beside + sum(who))
        for who in product((False, True), repeat=len(running))
    )
    assert mean_speed(running, beside) == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_who_is_always_busy_gets_an_even_share(count: int) -> None:
    crowd = {str(i): batching(100.0) for i in range(count)}
    for joined, settled in enumerate(settle(crowd)):
        assert settled.slowed == pytest.approx(dict.fromkeys(crowd, count + joined))
        assert settled.batches == dict.fromkeys(crowd, 1.0)


@given(several=st.lists(TENANTS, min_size=1, max_size=5), factor=st.floats(1, 3))
def test_more_of_one_makes_nobody_faster(several: list[Batching], factor: float) -> None:
    first, *rest = several
    busier = Batching(
        first.requests_per_s * factor, first.alone_s, first.full_s, first.slots, first.batches, first.stages
    )
    before = settle({str(i): t for i, t in enumerate(several)})
    after = settle({str(i): t for i, t in enumerate([busier, *rest])})
    for joined, (less, more) in enumerate(zip(before, after, strict=True)):
        for name, slowed in less.slowed.items():
            assert 1 + joined - 1e-9 <= slowed <= more.slowed[name] * (1 + 1e-2)
            assert slowed <= len(several) + joined + 1e-9


@given(several=st.lists(TENANTS, min_size=2, max_size=5))
def test_who_is_listed_first_is_never_a_reason(several: list[Batching]) -> None:
    named = {str(i): tenant for i, tenant in enumerate(several)}
    both = zip(settle(named), settle(dict(reversed(named.items()))), strict=True)
    for forth, back in both:
        assert forth.slowed == pytest.approx({name: back.slowed[name] for name in named}, rel=1e-2)


def test_a_batch_is_no_slower_than_one_after_the_other() -> None:
    """Whatever two estimates say that were made apart."""
    contradicted = batching(0.1, alone_s=0.5, full_s=8.0, slots=4)
    assert contradicted.crowd(1.0) == batching(0.1, alone_s=2.0, full_s=8.0, slots=4).crowd(1.0)


def test_a_lone_one_is_as_fast_as_on_gpus_of_its_own() -> None:
    settled, _ = settle({"a": batching(0.5, stages=BESIDE)})
    assert settled.slowed == {"a": 1.0}
    assert settled.batches == {"a": batching(0.5).crowd(1.0).batches}


@given(several=st.lists(TENANTS, min_size=1, max_size=5))
def test_it_comes_to_rest_where_nobody_moves_any_more(several: list[Batching]) -> None:
    """From where the map leads nowhere else, but for the 0.1% at which it is left."""
    named = {str(i): tenant for i, tenant in enumerate(several)}
    for joined, settled in enumerate(settle(named)):
        for name, tenant in named.items():
            assert settled.batches[name] == pytest.approx(tenant.crowd(settled.slowed[name]).batches, abs=1e-9)
            running = [
                [
                    min(1.0, d * settled.batches[other])
                    for other in named
                    if other != name
                    for d, keys in named[other].stages
                    if key in keys
                ]
                for _, (key,) in tenant.stages
            ]
            slower = sum(
                share / mean_speed(who, 1 + joined) for (share, _), who in zip(tenant.stages, running, strict=True)
            )
            assert slower == pytest.approx(settled.slowed[name], rel=1.1e-3)
