"""Continuous batching, many steps at once, against the engine's own scheduler step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.estimates import SteadyState
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.worlds import deploy_all, limits, second_per_step, serve
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Service
from traces.simulator.step_model import Limits, StepModel

_GAPS = st.floats(0.0, 3.0, allow_subnormal=False) | st.just(0.0)
_ASKED = st.tuples(_GAPS, st.integers(1, 60), st.integers(1, 40))


def _requests(asked: list[tuple[float, int, int]]) -> list[Request]:
    now_s, requests = 0.0, []
    for gap_s, input_tokens, output_tokens in asked:
        now_s += gap_s
        requests.append(Request(now_s, input_tokens, output_tokens))
    return requests


def _curved(bounds: Limits, pace: float) -> StepModel:
    """Bends in context and in tokens, and attention that grows with the square: nothing here is linear by luck."""
    contexts = np.array([1.0, 7.5, 20.0, 21.0, 100.0])
    batch = np.arange(1, bounds.max_batch + 1)[:, None]
    bend = np.array([0.0, 1.0, 1.1, 4.0, 4.0])
    tokens = np.arange(bounds.max_batched_tokens + 1)
    length = np.arange(bounds.max_context_tokens + 1)
    return StepModel(
        bounds,
        contexts=contexts,
        decode_s=pace * (0.1 + 0.013 * np.sqrt(batch) + 0.0071 * bend * batch),
        tokens_s=pace * (0.1 + 0.0037 * np.maximum(0, tokens - 5)),
        attention_s=pace * 0.00021 * length**1.9,
        steady_state=SteadyState(longest_share=0.17),
    )


def _assert_same(one: SimulationResult, other: SimulationResult) -> None:
    for name in ("first_token_s", "last_token_s"):
        np.testing.assert_allclose(
            getattr(one.outcomes, name), getattr(other.outcomes, name), rtol=1e-9, atol=1e-9, err_msg=name
        )
    assert one.gpus[0].busy_fraction == pytest.approx(other.gpus[0].busy_fraction, rel=1e-9)


_RANDOM_LOADS = given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 40),
    pace=st.sampled_from([0.05, 0.3, 1.0, 4.0]),
)


def _assert_equal_to_the_scheduler(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    steps = _curved(limits(max_batch, 100, max_batch + more_tokens), pace)
    requests = _requests(asked)
    fast, true = (serve(requests, steps, service=s) for s in (Service.CONTINUOUS, Service.STEPPED))
    _assert_same(fast, true)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@_RANDOM_LOADS
def test_equals_the_engines_scheduler_step_by_step(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    _assert_equal_to_the_scheduler(asked, max_batch, more_tokens, pace)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@_RANDOM_LOADS
def test_equals_it_on_twenty_thousand_loads(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    _assert_equal_to_the_scheduler(asked, max_batch, more_tokens, pace)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    whose=st.lists(st.sampled_from("abc"), min_size=25, max_size=25),
    pace=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_equals_it_on_a_shared_gpu_too(asked: list[tuple[float, int, int]], whose: list[str], pace: float) -> None:
    """Runs are slowed down, sped up and cut in the middle of steps; the steps end when they would have."""
    steps = _curved(limits(3, 100, 20), pace)
    requests = [replace(r, model=name) for r, name in zip(_requests(asked), whose, strict=False)]
    actions = deploy_all("a", "b", "c")
    fast, true = (
        serve(requests, steps, service=s, actions=actions) for s in (Service.CONTINUOUS, Service.STEPPED)
    )
    _assert_same(fast, true)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    max_batch=st.integers(1, 6),
    kv_tokens=st.integers(40, 300),
    kv_window=st.none() | st.integers(1, 100),
    pace=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_equals_it_where_kv_bounds_admission(
    asked: list[tuple[float, int, int]], max_batch: int, kv_tokens: int, kv_window: int | None, pace: float
) -> None:
    """Also in what is refused, for it is longer than all the KV there is."""
    bounds = replace(limits(max_batch, 100, max_batch + 20), kv_tokens=kv_tokens, kv_window=kv_window)
    steps = _curved(bounds, pace)
    requests = _requests(asked)
    fast, true = (serve(requests, steps, service=s) for s in (Service.CONTINUOUS, Service.STEPPED))
    assert fast.outcomes.failure.tolist() == true.outcomes.failure.tolist()
    _assert_same(fast, true)


@settings(max_examples=300, deadline=None)
@given(asked=st.lists(_ASKED, min_size=1, max_size=25), pace=st.sampled_from([0.05, 1.0]))
def test_one_slot_is_first_come_first_served(asked: list[tuple[float, int, int]], pace: float) -> None:
    steps = _curved(limits(1, 100, 16), pace)
    requests = _requests(asked)
    _assert_same(serve(requests, steps), serve(requests, steps, service=Service.FCFS))


def test_a_long_prompt_is_cut_beside_those_that_decode() -> None:
    """The second request's 20 tokens take 9, 9 and 2 of three steps, by hand, from the step after its arrival on.

    Steps of 1 s hold 10 tokens. The first request decodes from 1 s on.
    """
    steps = linear_steps(limits(2, 100, 10), step_s=1.0)
    outcomes = serve([Request(0.0, 5, 20), Request(1.5, 20, 2)], steps).outcomes
    assert outcomes.first_token_s.tolist() == [1.0, 5.0]
    assert outcomes.last_token_s.tolist() == [20.0, 6.0]


def test_who_arrives_together_is_admitted_together() -> None:
    outcomes = serve([Request(2.0, 5, 3), Request(2.0, 5, 3)], second_per_step(2)).outcomes
    assert outcomes.first_token_s.tolist() == [3.0, 3.0]
    assert outcomes.last_token_s.tolist() == [5.0, 5.0]


def test_without_a_free_slot_requests_wait_in_their_order() -> None:
    outcomes = serve([Request(0.0, 5, 4), Request(0.5, 5, 2), Request(0.6, 5, 1)], second_per_step(1)).outcomes
    assert outcomes.last_token_s.tolist() == [4.0, 6.0, 7.0]


def test_kv_room_bounds_admission_in_the_order_of_arrival() -> None:
    """30 tokens of KV: the second request (20) waits for the first (20), and the third (5) waits behind it."""
    bounds = Limits(max_batch=4, max_context_tokens=30, max_batched_tokens=64, kv_tokens=30)
    steps = linear_steps(bounds, step_s=1.0)
    asked = [Request(0.0, 15, 5), Request(0.0, 15, 5), Request(0.0, 4, 1)]
    outcomes = serve(asked, steps).outcomes
    assert outcomes.first_token_s.tolist() == [1.0, 6.0, 6.0]
    assert outcomes.last_token_s.tolist() == [5.0, 10.0, 6.0]


def test_a_window_bounds_what_is_kept() -> None:
    """Two requests of 20 tokens keep 12 each: both run in a room of 30, which one of 40 has too."""
    bounds = Limits(max_batch=4, max_context_tokens=50, max_batched_tokens=64, kv_tokens=30, kv_window=12)
    asked = [Request(0.0, 15, 5), Request(0.0, 15, 5), Request(10.0, 36, 4)]
    outcomes = serve(asked, linear_steps(bounds, step_s=1.0)).outcomes
    assert outcomes.first_token_s.tolist() == [1.0, 1.0, 11.0]
    assert outcomes.last_token_s.tolist() == [5.0, 5.0, 14.0]


@settings(max_examples=100, deadline=None)
@given(
    asked=st.lists(_ASKED, min_size=1, max_size=25), kv_tokens=st.integers(30, 200), max_batch=st.integers(1, 6)
)
def test_without_a_bound_on_tokens_slots_alone_bound_admission(
    asked: list[tuple[float, int, int]], kv_tokens: int, max_batch: int
) -> None:
    """A window that is no more than a slot's part of the room bounds nothing, as for states."""
    alone = limits(max_batch, 100, 4096)
    bounded = replace(alone, kv_tokens=kv_tokens, kv_window=max(1, kv_tokens // max_batch))
    requests = _requests(asked)
    _assert_same(*(serve(requests, linear_steps(each, step_s=0.5)) for each in (alone, bounded)))


@settings(max_examples=200, deadline=None)
@given(asked=st.lists(_ASKED, min_size=1, max_size=25), kv_tokens=st.integers(100, 200))
def test_kv_room_is_never_exceeded(asked: list[tuple[float, int, int]], kv_tokens: int) -> None:
    """Between admission (no later than the first token) and the last, what is reserved stays within the room."""
    bounds = Limits(max_batch=6, max_context_tokens=100, max_batched_tokens=4096, kv_tokens=kv_tokens)
    outcomes = serve(_requests(asked), linear_steps(bounds, step_s=0.5, context_token_s=0.01)).outcomes
    assert outcomes.completed.all()
    reserved = outcomes.asked_input_tokens + outcomes.asked_output_tokens
    for moment in outcomes.first_token_s:
        held = (outcomes.first_token_s <= moment) & (outcomes.last_token_s > moment)
        assert reserved[held].sum() <= kv_tokens


def test_what_is_longer_than_the_context_is_refused() -> None:
    steps = linear_steps(limits(2, 100, 10), step_s=1.0)
    outcomes = serve([Request(0.0, 60, 41), Request(0.0, 60, 40)], steps).outcomes
    assert outcomes.failure.tolist() == [Failure.BAD_REQUEST, Failure.NONE]
