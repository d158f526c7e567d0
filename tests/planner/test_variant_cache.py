"""Share of requests whose variant is loaded first, by Che's approximation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.adapter_slots import VariantLoad
from planner.variant_cache import missed_share

LOADS = st.builds(VariantLoad, st.integers(1, 200), st.floats(0, 3), st.sampled_from([0.0, 0.3, 0.9]))


@given(load=LOADS, more=st.integers(0, 50))
def test_nothing_is_missed_where_all_stay_loaded(load: VariantLoad, more: int) -> None:
    assert load.missed(load.variants + more) == 0.0


@given(load=LOADS, places=st.integers(1, 200))
def test_more_places_miss_less_and_none_more_than_is_asked_for(load: VariantLoad, places: int) -> None:
    asked = float(load.shares.sum())
    assert 0.0 <= load.missed(places + 1) <= load.missed(places) + 1e-12
    assert load.missed(places) <= asked + 1e-12
    assert load.missed(1) <= asked


@given(load=LOADS, places=st.integers(1, 200))
def test_no_policy_that_keeps_the_most_popular_misses_more(load: VariantLoad, places: int) -> None:
    assert load.missed(places) >= load.shares[places:].sum() - 1e-9


def test_of_variants_that_are_all_alike_those_without_a_place_are_missed() -> None:
    assert VariantLoad(64, 0.0).missed(32) == pytest.approx(0.5)
    assert VariantLoad(64, 0.0, base_share=0.5).missed(32) == pytest.approx(0.25)
    assert VariantLoad(1_000, 0.0).missed(1) == pytest.approx(0.999, abs=1e-3)


@pytest.mark.parametrize(("skew", "places"), [(0.5, 8), (1.0, 8), (1.0, 32), (1.5, 16)])
def test_the_share_is_that_of_a_cache_that_drops_the_least_recently_used(skew: float, places: int) -> None:
    load, rng = VariantLoad(100, skew), np.random.default_rng(3)
    kept: dict[int, None] = {}
    missed = 0
    drawn = rng.choice(load.variants, 60_000, p=load.shares)
    for row, variant in enumerate(drawn.tolist()):
        if variant in kept:
            del kept[variant]
        else:
            missed += row >= 10_000
            if len(kept) == places:
                del kept[next(iter(kept))]
        kept[variant] = None
    assert missed_share(load.shares, places) == pytest.approx(missed / 50_000, abs=0.01)
