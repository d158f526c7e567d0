"""Adapter slots that a base reserves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import ADAPTER_RANKS
from planner.adapter_slots import MOST_SLOTS, MOST_WITHOUT, VariantLoad, slot_need

LOADS = st.builds(VariantLoad, st.integers(1, 200), st.floats(0, 3))
REQUESTS = st.floats(0.1, 300)


@pytest.mark.parametrize(
    ("load", "requests"), [(VariantLoad(3, 0.0), 2.0), (VariantLoad(40, 1.0), 16.0), (VariantLoad(100, 1.5), 32.0)]
)
def test_the_share_without_a_slot_is_that_of_requests_drawn_at_random(load: VariantLoad, requests: float) -> None:
    rng = np.random.default_rng(1)
    weights = np.arange(1.0, load.variants + 1) ** -load.skew
    drawn = rng.poisson(requests * weights / weights.sum(), size=(20_000, load.variants))
    distinct = (drawn > 0).sum(axis=1)
    found = load.without_slot(requests)
    assert load.distinct(requests) == pytest.approx(distinct.mean(), rel=0.01)
    for slots in (0, 1, 2, 4, 8, 16):
        without = np.maximum(distinct - slots, 0).sum() / distinct.sum()
        assert found[slots] == pytest.approx(without, abs=0.005)


@given(load=LOADS, requests=REQUESTS)
def test_more_slots_leave_fewer_without(load: VariantLoad, requests: float) -> None:
    found = load.without_slot(requests)
    assert found[0] == 1.0
    assert np.all(np.diff(found) <= 1e-12)
    assert found[min(load.variants, MOST_SLOTS)] == pytest.approx(0.0, abs=1e-9) or load.variants > MOST_SLOTS


@given(load=LOADS, requests=REQUESTS, rank=st.integers(1, 256))
def test_a_need_is_the_fewest_slots_that_are_enough(load: VariantLoad, requests: float, rank: int) -> None:
    need, without = slot_need(load, rank, requests), load.without_slot(requests)
    assert need.without == without[need.slots]
    assert need.slots in (1, 2, 4, 8, 16, 32, 64)
    assert need.slots < 2 * load.variants
    enough = need.without <= MOST_WITHOUT or need.slots >= min(load.variants, MOST_SLOTS)
    assert enough
    assert need.slots == 1 or without[need.slots // 2] > MOST_WITHOUT
    assert need.rank in ADAPTER_RANKS
    assert need.rank >= rank
    assert need.rank == min(one for one in ADAPTER_RANKS if one >= rank)


@given(load=LOADS, requests=REQUESTS, slots=st.integers(1, MOST_SLOTS))
def test_slots_that_are_asked_for_are_taken(load: VariantLoad, requests: float, slots: int) -> None:
    need = slot_need(load, 16, requests, slots)
    assert (need.slots, need.is_fixed) == (slots, True)
    assert need.without == load.without_slot(requests)[slots]
    assert not slot_need(load, 16, requests).is_fixed


@given(load=LOADS, requests=REQUESTS, base_share=st.floats(0, 0.99))
def test_requests_for_the_base_are_as_so_many_fewer_for_variants(
    load: VariantLoad, requests: float, base_share: float
) -> None:
    mixed = replace(load, base_share=base_share)
    assert mixed.shares.sum() == pytest.approx(1 - base_share)
    assert mixed.asked_for(requests) == pytest.approx(load.asked_for(requests * (1 - base_share)))
    assert slot_need(mixed, 16, requests).slots <= slot_need(load, 16, requests).slots


def test_few_popular_variants_need_fewer_slots_than_many_alike() -> None:
    assert slot_need(VariantLoad(100, 1.5), 16, 32).slots == 16
    assert slot_need(VariantLoad(100, 0.0), 16, 32).slots == 32
    assert slot_need(VariantLoad(10_000, 1.0), 16, 32).slots == 32
