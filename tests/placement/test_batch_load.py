"""The load of a worker that batches: closed forms, its chain state by state, and laws."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.batch_load import Batching, Chains
from tests.placement import plain_batches as plain

ALONE = ((1.0, (("n", "g0"),)),)


def batching(rate: float, alone_s: float = 2.0, full_s: float = 6.0, slots: int = 8, batches: int = 1) -> Batching:
    return Batching(rate, alone_s, full_s, slots, batches, ALONE)


@st.composite
def tenants(draw: st.DrawFn) -> Batching:
    alone_s, slots = draw(st.floats(0.1, 4)), draw(st.integers(1, 40))
    return batching(
        draw(st.floats(0, 3)),
        alone_s,
        alone_s * (1 + draw(st.floats(0, 1)) * (slots - 1)),
        slots,
        draw(st.sampled_from([1, 1, 2, 4])),
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


@given(tenant=TENANTS, slowed=st.floats(1, 4))
def test_it_is_the_birth_and_death_chain(tenant: Batching, slowed: float) -> None:
    if plain.saturation(tenant) * slowed >= 1:
        assert tenant.under_way(slowed) == min(tenant.batches, tenant.slots)
    elif tenant.requests_per_s > 1e-6 and plain.saturation(tenant) * slowed <= 0.95:
        assert tenant.under_way(slowed) == pytest.approx(plain.under_way(tenant, slowed), rel=1e-6)


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


def test_a_batch_is_no_slower_than_one_after_the_other() -> None:
    """Whatever two estimates say that were made apart."""
    contradicted = batching(0.1, alone_s=0.5, full_s=8.0, slots=4)
    assert contradicted.under_way(1.0) == batching(0.1, alone_s=2.0, full_s=8.0, slots=4).under_way(1.0)


@given(several=st.lists(TENANTS, min_size=1, max_size=5), slowed=st.floats(1, 4), more=st.floats(1, 3))
def test_several_at_once_are_each_by_itself(several: list[Batching], slowed: float, more: float) -> None:
    """Whatever is left out as negligible where it is slowed more."""
    at_once = Chains(several, slowed * more).under_way(np.full(len(several), slowed))
    assert at_once.tolist() == pytest.approx([tenant.under_way(slowed) for tenant in several], rel=1e-9, abs=1e-12)
