"""Waits for loads next to the steps: laws, limits that are known, and a replay of one thread."""

from __future__ import annotations

import heapq
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.load_columns import LoadColumns, LoadWait, load_wait_at
from fingerprint.load_waits import OFFERED, LoadWaits
from planner import variant_cache
from planner.adapter_slots import VariantLoad
from planner.variant_cache import load_waits, missed_share
from tests.planner.md1 import md1_wait_quantile

LOADS = st.builds(VariantLoad, st.integers(2, 200), st.floats(0, 3), st.sampled_from([0.0, 0.3, 0.9]))
RATES = np.geomspace(0.002, 200, 60)


def waits(load: VariantLoad, places: int, load_s: float = 1.0) -> LoadWaits:
    found = load.load_waits(places, places, load_s)
    assert found is not None
    return found


def at(found: LoadWaits, rates_per_s: np.ndarray) -> LoadWait:
    columns = LoadColumns.of([found])
    assert columns is not None
    return columns.at(rates_per_s[:, None])


@given(load=LOADS, more=st.integers(0, 50), load_s=st.floats(0, 100))
def test_none_waits_where_all_stay_loaded(load: VariantLoad, more: int, load_s: float) -> None:
    assert load.load_waits(1, load.variants + more, load_s) is None
    assert load.load_waits(1, 1, 0.0) is None
    assert LoadColumns.of([None, None]) is None


@settings(deadline=None)
@given(load=LOADS, places=st.integers(1, 100), load_s=st.floats(0.1, 10))
def test_rare_requests_wait_for_their_own_load_alone(load: VariantLoad, places: int, load_s: float) -> None:
    """The share is Che's, the wait that of the load, within 3% where one request arrives in 32 loads."""
    if places >= load.variants:
        return
    share, mean_s = load_wait_at(waits(load, places, load_s), OFFERED[0] / load_s)
    assert share == pytest.approx(missed_share(load.shares, places), rel=0.03)
    assert mean_s == pytest.approx(load_s, rel=0.03)


@settings(deadline=None)
@given(load=LOADS, places=st.integers(1, 100), load_s=st.floats(0.1, 10), longer=st.floats(1.0, 3.0))
def test_the_wait_grows_with_the_rate_the_seconds_and_fewer_places(
    load: VariantLoad, places: int, load_s: float, longer: float
) -> None:
    if places + 1 >= load.variants:
        return
    mean_s = at(waits(load, places, load_s), RATES).of_all_s[:, 0]
    assert (np.diff(mean_s) >= -1e-3 * mean_s[1:]).all()
    assert (at(waits(load, places, longer * load_s), RATES).of_all_s[:, 0] >= mean_s * (1 - 1e-3)).all()
    assert (at(waits(load, places + 1, load_s), RATES).of_all_s[:, 0] <= mean_s * (1 + 1e-3)).all()


@settings(deadline=None)
@given(load=LOADS, places=st.integers(1, 100))
def test_no_request_waits_for_more_loads_than_there_are_variants(load: VariantLoad, places: int) -> None:
    """A round of all variants is the longest wait, by half a load."""
    if places >= load.variants:
        return
    found = at(waits(load, places), RATES)
    assert (found.share <= load.shares.sum() + 1e-6).all()
    assert (found.mean_s <= load.variants + 0.5).all()
    assert (found.least_s >= 0).all()
    assert (found.shorter >= 0).all()
    assert (found.shorter < 1).all()


def test_a_thread_with_many_rare_variants_is_a_queue_with_constant_services() -> None:
    """2,000 even variants and one place: hardly any share a load, so that M/D/1 is exact for the mean."""
    found = waits(VariantLoad(2_000, 0.0), 1)
    for busy in (0.25, 0.5, 0.7):
        _, mean_s = load_wait_at(found, busy)
        assert mean_s == pytest.approx(1 + busy / (2 * (1 - busy)), rel=0.05)
        p99 = at(found, np.array([busy])).quantile_s(0.99)[0, 0]
        assert p99 == pytest.approx(1 + md1_wait_quantile(np.array([busy]), 99.0)[0], rel=0.25)


def test_a_flood_of_requests_waits_for_half_a_round_of_all_variants() -> None:
    """32 even variants, 8 places: each is loaded once in 32 loads, and its requests arrive evenly meanwhile."""
    share, mean_s = load_wait_at(waits(VariantLoad(32, 0.0), 8, 2.0), 1_000.0)
    assert share == pytest.approx(1.0, abs=0.05)
    assert mean_s == pytest.approx(32, rel=0.05)


def test_requests_for_the_base_wait_for_no_load() -> None:
    """Half for the base at twice the rate: the same loads, and half of the share waits."""
    share, mean_s = load_wait_at(waits(VariantLoad(64, 1.0), 8), 0.8)
    half, same_s = load_wait_at(waits(VariantLoad(64, 1.0, base_share=0.5), 8), 1.6)
    assert (2 * half, same_s) == pytest.approx((share, mean_s), rel=0.02)


def test_columns_have_no_wait_where_there_are_no_such_loads() -> None:
    found = waits(VariantLoad(64, 1.0), 8)
    both = LoadColumns.of([None, found])
    assert both is not None
    mixed = both.at(np.array([2.0, 2.0]))
    assert mixed.of_all_s[0] == 0.0
    share, mean_s = load_wait_at(found, 2.0)
    assert mixed.of_all_s[1] == share * mean_s
    assert both.take(np.array([1, 1])).at(np.array([2.0, 2.0])).of_all_s.tolist() == [share * mean_s] * 2


def test_rows_with_the_same_waits_share_a_table() -> None:
    one, other = (waits(VariantLoad(64, skew), 8) for skew in (0.0, 1.0))
    columns = LoadColumns.of([one, None, other, one, None])
    assert columns is not None
    assert columns.tables.shape == (4, len(OFFERED), 3)
    alone = [at(found, np.array([2.0])).of_all_s[0, 0] for found in (one, other)]
    assert columns.at(np.full(5, 2.0)).of_all_s.tolist() == [alone[0], 0.0, alone[1], alone[0], 0.0]


@pytest.mark.parametrize(("skew", "slots", "places"), [(0.0, 8, 32), (0.7, 32, 32), (1.0, 8, 8), (2.0, 4, 16)])
def test_groups_of_unpopular_variants_wait_as_each_of_them_does(
    skew: float, slots: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,500 variants, of which 1,244 are in groups, and each by itself."""
    load = VariantLoad(1_500, skew)
    grouped = load.load_waits(slots, places, 1.0)
    monkeypatch.setattr(variant_cache, "_SINGLE", load.variants)
    each = load.load_waits(slots, places, 1.0)
    assert grouped is not None
    assert each is not None
    assert grouped != each or not skew
    for name in ("shares", "means", "least", "shorter"):
        assert getattr(grouped, name) == pytest.approx(getattr(each, name), rel=1e-4, abs=1e-6)


@given(number=st.integers(1, 10_000), skew=st.floats(0, 3))
def test_groups_hold_all_variants_and_are_few(number: int, skew: float) -> None:
    asked = VariantLoad(number, skew).shares
    mean, members = variant_cache._grouped(asked)
    assert members.sum() == number
    assert (mean * members).sum() == pytest.approx(1.0)
    assert (np.diff(mean) <= 1e-15).all()
    assert len(mean) <= min(number, 256 + 185)


def replayed(load: VariantLoad, places: int, rate: float, requests: int = 40_000) -> tuple[float, float]:
    """Return the share of requests that wait for a thread of loads of 1 s, and their mean wait.

    A variant takes a place from its order on; the one that was not asked for longest gives way. Where all places
    are ordered, orders wait for one.
    """
    rng = np.random.default_rng(1)
    at_s = np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    drawn = rng.choice(load.variants, requests, p=load.shares).tolist()
    loaded: OrderedDict[int, None] = OrderedDict()
    ordered: OrderedDict[int, list[float]] = OrderedDict()  # those under way and those that wait, with arrivals
    ends: list[float] = []
    found: list[float] = []

    def end(now_s: float) -> None:
        variant, arrived = ordered.popitem(last=False)
        found.extend(now_s - one for one in arrived)
        loaded[variant] = None
        while len(loaded) + len(ordered) > places and loaded:
            loaded.popitem(last=False)
        if ordered:
            heapq.heappush(ends, now_s + 1.0)

    for now_s, variant in zip(at_s, drawn, strict=True):
        while ends and ends[0] <= now_s:
            end(heapq.heappop(ends))
        if variant in loaded:
            loaded.move_to_end(variant)
        elif variant in ordered:
            ordered[variant].append(now_s)
        else:
            if len(loaded) + len(ordered) >= places and loaded:
                loaded.popitem(last=False)
            ordered[variant] = [now_s]
            if len(ordered) == 1:
                heapq.heappush(ends, now_s + 1.0)
    return len(found) / requests, float(np.mean(found))


@pytest.mark.parametrize("skew", [0.0, 1.0, 1.5])
@pytest.mark.parametrize(
    ("busy", "of_all", "of_share"), [(0.3, 0.15, 0.02), (1.0, 0.4, 0.1), (2.0, 0.15, 0.02), (5.0, 0.15, 0.02)]
)
def test_the_law_is_that_of_a_replay(skew: float, busy: float, of_all: float, of_share: float) -> None:
    """64 variants, 8 places. It is worst where loads would take just all of the time."""
    load = VariantLoad(64, skew)
    rate = busy / load.missed(8)
    share, mean_s = load_wait_at(waits(load, 8), rate)
    true_share, true_s = replayed(load, 8, rate)
    assert share == pytest.approx(true_share, abs=of_share)
    assert share * mean_s == pytest.approx(true_share * true_s, rel=of_all)


def test_the_table_is_of_all_its_rates() -> None:
    found = load_waits(VariantLoad(64, 1.0).shares, 8, 8, 1.5)
    assert found is not None
    assert len(found.shares) == len(found.means) == len(found.least) == len(OFFERED)
    assert np.diff(OFFERED).min() > 0


@settings(deadline=None)
@given(load=LOADS, places=st.integers(1, 100), rate=st.floats(0.01, 50))
def test_the_mean_is_that_of_the_quantiles(load: VariantLoad, places: int, rate: float) -> None:
    if places >= load.variants:
        return
    found = at(waits(load, places), np.array([rate]))
    spread = np.array([found.quantile_s(one)[0, 0] for one in (np.arange(2_000) + 0.5) / 2_000])
    assert (np.diff(spread) >= -1e-9).all()
    assert spread.mean() == pytest.approx(found.mean_s[0, 0], rel=0.02)


@pytest.mark.parametrize(("variants", "places", "skew", "base"), [(132, 92, 1.2, 0.3), (186, 92, 1.2, 0.0)])
def test_where_the_wait_jumps_means_are_those_of_the_quantiles(
    variants: int, places: int, skew: float, base: float
) -> None:
    """Between two knots about the jump the least wait, interpolated by itself, was beyond the mean."""
    found = at(waits(VariantLoad(variants, skew, base), places), np.geomspace(1, 50, 200))
    spread = np.mean([found.quantile_s(one)[:, 0] for one in (np.arange(500) + 0.5) / 500], axis=0)
    assert spread == pytest.approx(found.mean_s[:, 0], rel=0.02)


@settings(deadline=None)
@given(load=LOADS, slots=st.integers(1, 20), rate=st.floats(0.01, 50))
def test_orders_without_a_slot_take_no_places(load: VariantLoad, slots: int, rate: float) -> None:
    """Fewer slots leave more places to what is loaded, so that no more is waited for."""
    places = 4 * slots
    if places >= load.variants:
        return
    few, many = (load.load_waits(number, places, 1.0) for number in (slots, places))
    assert few is not None
    assert many is not None
    (few_share, few_s), (share, mean_s) = load_wait_at(few, rate), load_wait_at(many, rate)
    assert few_share * few_s <= share * mean_s * (1 + 1e-3)
