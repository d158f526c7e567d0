"""Number of variants in a step by step times: laws, and the replay of a closed loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.variant_routing import FirstComeFirstServed, LeastLoaded
from planner.adapter_slots import MOST_SLOTS, VariantLoad
from planner.delta_slots import busy_periods, flow_with_slots, slots_by_step_time
from tests.bench.delta_policies import COPY_S, OUTPUT, ROWS, arrivals, completed_per_s, step_s, workers
from traces.simulator.variants import replay_variants

LOADS = st.builds(VariantLoad, st.integers(1, 40), st.floats(0, 3), st.floats(0, 0.5))
REQUESTS = st.floats(1, 80)
STEPS = 100


def linear(per_variant_s: float):
    return lambda rows, distinct: 5e-3 + 2e-5 * rows + per_variant_s * distinct


def test_a_busy_period_of_one_customer_is_the_textbooks() -> None:
    """M/M/inf (M/G/inf as well): (exp(r) - 1) / r mean services."""
    offered = np.array([0.01, 0.5, 1.0, 3.0])
    found = busy_periods(offered, 3)
    assert found[0] == pytest.approx(np.zeros(4))
    assert found[1] == pytest.approx(np.expm1(offered) / offered, rel=1e-6)
    assert np.all(np.diff(found, axis=0) > 0)


def test_customers_of_none_that_arrive_are_served_at_once() -> None:
    """The longest of k exponential services: 1 + 1/2 + ... + 1/k."""
    found = busy_periods(np.array([1e-12]), 4)[:, 0]
    assert found == pytest.approx([0, 1, 1 + 1 / 2, 1 + 1 / 2 + 1 / 3, 1 + 1 / 2 + 1 / 3 + 1 / 4])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(load=LOADS, requests=REQUESTS, slots=st.integers(1, 40), per_variant_s=st.floats(0, 5e-3))
def test_a_flow_keeps_its_limits(load: VariantLoad, requests: float, slots: int, per_variant_s: float) -> None:
    found = flow_with_slots(load, requests, slots, linear(per_variant_s), steps=STEPS, max_rows=64)
    assert 0 < found.rows <= min(requests, 64) + 1e-9
    assert found.distinct <= min(slots, load.variants, found.rows) + 1e-9
    per_s = found.rows / found.step_s / STEPS
    assert found.rows + per_s * found.waiting_s == pytest.approx(requests)  # Little's law
    if slots >= load.variants:
        assert found.rows == pytest.approx(min(requests, 64))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(load=LOADS, requests=st.floats(1, 64))
def test_variants_that_cost_nothing_get_slots_until_more_serve_none_faster(
    load: VariantLoad, requests: float
) -> None:
    found = slots_by_step_time(load, requests, linear(0.0), steps=STEPS, max_rows=64)
    whole = flow_with_slots(load, requests, MOST_SLOTS, linear(0.0), steps=STEPS, max_rows=64)
    assert found.rows_per_s >= 0.99 * whole.rows_per_s


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(load=LOADS, requests=REQUESTS, per_variant_s=st.floats(0, 5e-3))
def test_the_choice_is_the_fewest_slots_within_a_hundredth_of_the_best(load, requests, per_variant_s) -> None:
    cost = linear(per_variant_s)
    found = slots_by_step_time(load, requests, cost, steps=STEPS, max_rows=32)
    flows = [
        flow_with_slots(load, requests, number, cost, steps=STEPS, max_rows=32)
        for number in (1, 2, 4, 8, 16, 32, 64)
        if number < 2 * load.variants
    ]
    best = max(one.rows_per_s for one in flows)
    assert found.rows_per_s >= 0.99 * best
    assert all(one.rows_per_s < 0.99 * best for one in flows if one.slots < found.slots)


def test_where_many_requests_queue_fewer_variants_share_longer_batches() -> None:
    """Twice as many requests as rows: with 32 slots every step has as many deltas as are asked for."""
    load = VariantLoad(32, 1.0)
    queued = slots_by_step_time(load, 128, step_s, steps=OUTPUT, max_rows=ROWS)
    none = slots_by_step_time(load, 64, step_s, steps=OUTPUT, max_rows=ROWS)
    assert (queued.slots, none.slots) == (16, 32)
    eager = slots_by_step_time(load, 64, step_s, steps=OUTPUT, max_rows=ROWS, most_slots=8)
    assert eager.slots == 8


def test_loads_make_more_slots_worth_having() -> None:
    """Long loads of a variant that is missing weigh more than what distinct variants add to a step."""
    load = VariantLoad(32, 1.0)
    free = slots_by_step_time(load, 8, step_s, steps=OUTPUT, max_rows=ROWS)
    found = slots_by_step_time(
        load, 8, step_s, steps=OUTPUT, max_rows=ROWS, loads_s=lambda slots: 20.0 * load.missed(slots)
    )
    assert (free.slots, found.slots) == (8, 32)


@settings(max_examples=20, deadline=None)
@given(load=LOADS, requests=st.floats(1, 32), load_s=st.floats(0, 10))
def test_no_more_requests_end_than_loads_next_to_steps_let_begin(load, requests, load_s) -> None:
    """Loads that take less time than steps cost nothing, those that take more are the pace."""

    def loads_s(slots: int) -> float:
        return load_s * load.missed(slots)

    cost = {"step_s": linear(1e-3), "steps": STEPS, "max_rows": 32, "loads_s": loads_s}
    free = slots_by_step_time(load, requests, **(cost | {"loads_s": lambda slots: 0.0}))
    found = slots_by_step_time(load, requests, **cost, loads_stop_steps=False)
    stopped = slots_by_step_time(load, requests, **cost)
    assert found.rows_per_s * loads_s(found.slots) <= STEPS * (1 + 1e-9)
    assert 0.99 * stopped.rows_per_s <= found.rows_per_s <= free.rows_per_s / 0.99


def test_even_variants_whose_loads_are_long_all_have_slots() -> None:
    # With 16 slots one of five requests would wait for a load of two seconds: 2.5 requests each second.
    load = VariantLoad(20, 0.0)
    found = slots_by_step_time(
        load,
        32,
        step_s,
        steps=OUTPUT,
        max_rows=ROWS,
        loads_s=lambda slots: 2.0 * load.missed(slots),
        loads_stop_steps=False,
    )
    assert found.slots == 32


@pytest.mark.slow
@pytest.mark.parametrize(("skew", "clients"), [(0.0, 32), (1.0, 16), (1.0, 64), (1.5, 32), (4.0, 64)])
@pytest.mark.parametrize("slots", [2, 4, 16])
def test_the_flow_is_that_of_a_replayed_closed_loop(skew: float, clients: int, slots: int) -> None:
    """Requests may pass for as long as they like; a bound costs more (docs/decisions/0049-delta-scheduling.md)."""
    found = flow_with_slots(VariantLoad(32, skew), clients, slots, step_s, steps=OUTPUT, max_rows=ROWS)
    trace = arrivals(5, skew, 1.0, 1500)
    played = replay_variants(trace, workers(slots), LeastLoaded(bound_s=1e9), clients=clients)
    assert OUTPUT * len(trace) / played.ended_s == pytest.approx(found.rows_per_s, rel=0.15)


@pytest.mark.parametrize(
    "fields",
    [
        {"requests": 0.0},
        {"requests": float("inf")},
        {"steps": 0},
        {"max_rows": 0},
        {"most_slots": 0},
    ],
)
def test_impossible_questions(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        slots_by_step_time(VariantLoad(3, 1.0), step_s=linear(0.0), **({"requests": 8, "steps": 10} | fields))


def test_a_closed_loop_is_replayed_in_the_order_that_it_was_given() -> None:
    """Requests that skip the line for a delta that has a slot complete more than first come, first served."""
    per_s = [
        completed_per_s(1.0, 16, 4, 300, 1, policy, COPY_S) for policy in (LeastLoaded(), FirstComeFirstServed())
    ]
    assert per_s[0] > per_s[1]
