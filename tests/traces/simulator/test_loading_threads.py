"""Loads next to the steps of a worker: they hold up the requests for their variant, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.simulator.test_adapter_workers import ALL_AT_ONCE, asked_of, costs
from tests.traces.simulator.test_continuous import _ASKED, _curved
from tests.traces.simulator.variant_worlds import serve_variants, variants_of
from tests.traces.simulator.worlds import limits, second_per_step
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.step_model import StepModel

_ASKED_FOR = st.lists(_ASKED, min_size=1, max_size=25)
_NAMES = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=25, max_size=25)
_LOAD_S = 0.41372  # ends when no step does


def next_to_steps(load_s: float = _LOAD_S) -> AdapterCost:
    return replace(costs(load_s=load_s), stops_steps=False)


def bends(max_batch: int, more_tokens: int, *, plans_ahead: bool = False, preempts: bool = False) -> StepModel:
    bounds = limits(max_batch, 100, max_batch + more_tokens)
    if preempts:
        bounds = replace(bounds, kv_tokens=10**6, preempts=True)
    steps = _curved(bounds, 1.0)
    steps.plans_ahead, steps.hidden_s = plans_ahead, 0.03 * plans_ahead
    return steps


def load_ends(requests: list[Request], load_s: float) -> dict[str, float]:
    """Return when each variant is loaded, by one load at a time in the order in which they are asked for."""
    ends: dict[str, float] = {}
    free_s = 0.0
    for request in requests:
        if request.model and request.model not in ends:
            free_s = ends[request.model] = max(free_s, request.arrival_s) + load_s
    return ends


def test_only_requests_for_the_variant_wait() -> None:
    """The base's request decodes on. Loads end at 11.5 and 21.5 s, in the steps until 12 and 22 s."""
    cost = AdapterCost(slots=2, max_loaded=2, load_s=10.0, stops_steps=False)
    asked = [(0.0, 30, ""), (1.5, 2, "a"), (1.6, 2, "b"), (1.7, 1, "a")]
    requests = [Request(at_s, 5, tokens, model=name) for at_s, tokens, name in asked]
    result = serve_variants(requests, second_per_step(4), cost)
    assert result.outcomes.first_token_s.tolist() == [1.0, 13.0, 23.0, 13.0]
    assert result.outcomes.last_token_s.tolist() == [30.0, 14.0, 24.0, 13.0]
    found = variants_of(result)
    assert (found.loads, found.load_s, found.requests) == (2, 10.0, 3)
    assert found.ttft_cold is not None
    assert (found.ttft_cold.count, found.ttft_warm) == (3, None)


def test_an_idle_worker_begins_at_the_end_of_the_load() -> None:
    cost = AdapterCost(slots=2, max_loaded=2, load_s=2.25, stops_steps=False)
    requests = [Request(0.5, 5, 2, model="a"), Request(0.75, 5, 2), Request(4.25, 5, 2, model="a")]
    outcomes = serve_variants(requests, second_per_step(4), cost).outcomes
    assert outcomes.first_token_s.tolist() == [3.75, 1.75, 5.75]


@settings(max_examples=150, deadline=None)
@given(
    asked=_ASKED_FOR,
    variants=_NAMES,
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 40),
    plans_ahead=st.booleans(),
    preempts=st.booleans(),
)
def test_requests_fare_as_if_they_arrived_when_their_load_has_ended(
    asked: list[tuple[float, int, int]],
    variants: list[str],
    max_batch: int,
    more_tokens: int,
    plans_ahead: bool,
    preempts: bool,
) -> None:
    """The whole law, which has the first token after the rest of the load, too."""
    requests = asked_of(asked, variants)
    ends = load_ends(requests, _LOAD_S)
    later = [replace(one, arrival_s=max(one.arrival_s, ends.get(one.model, 0.0))) for one in requests]
    order = sorted(range(len(later)), key=lambda row: later[row].arrival_s)
    steps = bends(max_batch, more_tokens, plans_ahead=plans_ahead, preempts=preempts)
    found, expected = (
        serve_variants(of, steps, cost, outstanding_per_slot=ALL_AT_ONCE).outcomes
        for of, cost in ((requests, next_to_steps()), ([later[row] for row in order], costs(load_s=0.0)))
    )
    np.testing.assert_allclose(found.first_token_s[order], expected.first_token_s, rtol=1e-12)
    np.testing.assert_allclose(found.last_token_s[order], expected.last_token_s, rtol=1e-12)
    rest_s = np.array([ends.get(one.model, 0.0) - one.arrival_s for one in requests])
    assert (found.first_token_s - found.arrival_s > rest_s).all()


@settings(max_examples=100, deadline=None)
@given(asked=_ASKED_FOR, variants=_NAMES, max_batch=st.integers(1, 6), more_tokens=st.integers(0, 40))
def test_a_load_delays_no_request_of_another_variant(
    asked: list[tuple[float, int, int]], variants: list[str], max_batch: int, more_tokens: int
) -> None:
    """The base fares as if requests whose load ends after all of its own had never arrived, to the bit."""
    requests, steps = asked_of(asked, variants), bends(max_batch, more_tokens)
    of_base = [row for row, one in enumerate(requests) if not one.model]
    if not of_base:
        return
    cost = next_to_steps(load_s=1e6)
    among = serve_variants(requests, steps, cost, outstanding_per_slot=ALL_AT_ONCE).outcomes
    alone = serve_variants([requests[row] for row in of_base], steps, cost).outcomes
    assert among.first_token_s[of_base].tolist() == alone.first_token_s.tolist()
    assert among.last_token_s[of_base].tolist() == alone.last_token_s.tolist()
    assert (np.delete(among.first_token_s, of_base) > 1e6).all()


@pytest.mark.parametrize("replicas", [1, 2])
@settings(max_examples=50, deadline=None)
@given(asked=_ASKED_FOR, variants=_NAMES, max_batch=st.integers(1, 6))
def test_loads_that_take_no_time_are_the_same_next_to_steps_and_between_them(
    replicas: int, asked: list[tuple[float, int, int]], variants: list[str], max_batch: int
) -> None:
    requests, steps = asked_of(asked, variants), bends(max_batch, 20)
    next_to, between = (
        serve_variants(requests, steps, cost, replicas=replicas)
        for cost in (next_to_steps(load_s=0.0), costs(load_s=0.0))
    )
    assert next_to.outcomes.last_token_s.tolist() == between.outcomes.last_token_s.tolist()
    assert variants_of(next_to) == variants_of(between)
