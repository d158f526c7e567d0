"""Loads that replicas spare one another: bounds, the rate, and a closed form for one slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.queueing import ServiceColumns, Variation, requests_at_once, slot_wait
from fingerprint.spared_loads import at_rate, spared_column

POISSON = Variation()
SPARED_S = 0.3
RATES = st.floats(1e-6, 30.0)
SLOTS = st.sampled_from([1.0, 4.0, 8.9, 64.0])


def columns(slots: float, spared_s: float = SPARED_S) -> ServiceColumns:
    """Return a replica with prompts of 0.1 s that loads make 0.5 s, and 100 further tokens."""
    one = np.ones(1)
    return ServiceColumns(
        most=slots * one,
        prompt_s=0.5 * one,
        added_prompt_s=0.45 * one,
        more_tokens=100 * one,
        intercepts_s=np.array([[0.01]]),
        slopes_s=np.array([[0.0001]]),
        spared_s=spared_s * one,
    )


def left_s(slots: float, rate_per_s: float, variation: Variation = POISSON) -> float:
    """Return the seconds that loads which could be spared take at a rate."""
    found = at_rate(columns(slots), np.array([rate_per_s]), variation)
    assert found.spared_s is None
    assert 0.45 - found.added_prompt_s[0] == pytest.approx(0.5 - found.prompt_s[0])
    return float(found.prompt_s[0]) - (0.5 - SPARED_S)


@given(slots=SLOTS, rate=RATES, burstiness=st.sampled_from([0.0, 1.0, 3.0]))
def test_what_is_left_is_between_nothing_and_all_and_grows_with_the_rate(
    slots: float, rate: float, burstiness: float
) -> None:
    variation = Variation(burstiness=burstiness)
    left = left_s(slots, rate, variation)
    assert -1e-12 <= left <= SPARED_S + 1e-12
    assert left_s(slots, 1.1 * rate, variation) >= left - 1e-9


@pytest.mark.parametrize("slots", [1.0, 8.9, 64.0])
def test_next_to_no_load_all_is_spared_and_nothing_of_a_rate_that_is_not_served(slots: float) -> None:
    most_per_s = 1 / float(columns(slots).slot_s[0])
    assert left_s(slots, 1e-9) == pytest.approx(0.0, abs=1e-6)
    assert left_s(slots, 1.001 * most_per_s) == pytest.approx(SPARED_S)
    assert left_s(slots, 5 * most_per_s) == pytest.approx(SPARED_S)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4, 0.6])
def test_of_one_slot_the_share_left_is_the_utilisation_with_just_these_loads(rate: float) -> None:
    """A lone slot is taken for the share u: ``u = rate (T - (1 - u) S)``, T the time with all loads."""
    whole_s = float(columns(1.0).slot_s[0])
    used = rate * (whole_s - SPARED_S) / (1 - rate * SPARED_S)
    assert left_s(1.0, rate) == pytest.approx(used * SPARED_S, rel=1e-3)


@given(slots=SLOTS, of_most=st.floats(0.01, 0.9))
def test_the_share_left_is_that_of_requests_without_a_slot_at_what_is_left(slots: float, of_most: float) -> None:
    rate = np.array([of_most / float(columns(slots).slot_s[0])])
    found = at_rate(columns(slots), rate, POISSON)
    used = rate * found.slot_s
    peak = requests_at_once(found, used, POISSON).peak
    share = float(slot_wait(found, used, POISSON, peak).share[0])
    assert left_s(slots, float(rate[0])) == pytest.approx(share * SPARED_S, abs=2e-3)


@pytest.mark.parametrize("burstiness", [0.0, 3.0])
@pytest.mark.parametrize("slots", [1.0, 8.9])
def test_arrivals_that_vary_find_the_share_of_slots_taken_that_their_queue_has(
    slots: float, burstiness: float
) -> None:
    variation = Variation(burstiness=burstiness)
    rate = 0.5 / columns(slots).slot_s
    found = at_rate(columns(slots), rate, variation)
    used = rate * found.slot_s
    peak = requests_at_once(found, rate * columns(slots).slot_s, variation).peak
    share = float(slot_wait(found, used, variation, peak).share[0])
    assert left_s(slots, float(rate[0]), variation) == pytest.approx(share * SPARED_S, abs=1e-3)
    of_poisson_s = left_s(slots, float(rate[0]))
    assert (share * SPARED_S > of_poisson_s) == (burstiness > 1)


def test_rows_are_worked_out_by_themselves_and_one_that_is_spared_nothing_is_the_same_to_the_bit() -> None:
    rows = [columns(4.0), columns(4.0, 0.0), columns(4.0, 0.1)]
    names = ("most", "prompt_s", "added_prompt_s", "more_tokens", "spared_s")
    both = replace(
        rows[0],
        intercepts_s=np.full((1, 3), 0.01),
        slopes_s=np.full((1, 3), 0.0001),
        **{name: np.concatenate([getattr(row, name) for row in rows]) for name in names},
    )
    rate = np.full(3, 0.6)
    found = at_rate(both, rate, POISSON)
    assert found.prompt_s.tolist() == [at_rate(row, rate[:1], POISSON).prompt_s[0] for row in rows]
    assert (found.prompt_s[1], found.added_prompt_s[1]) == (0.5, 0.45)
    assert at_rate(both.take(np.array([2])), rate[:1], POISSON).prompt_s[0] == found.prompt_s[2]
    none = replace(both, spared_s=None)
    assert at_rate(none, rate, POISSON) is none


def test_seconds_are_those_of_the_number_of_replicas_and_of_more_the_last() -> None:
    table = (0.0, 0.2, 0.3)
    found = spared_column([table, table, table, (), table], [1, 2, 3, 2, 9])
    assert found is not None
    assert found.tolist() == [0.0, 0.2, 0.3, 0.0, 0.3]
    assert spared_column([table, ()], [1, 7]) is None
