"""Forecast of a request's latency, from the requests before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.service_model import ServiceModel
from planner.latency_forecast import RemainingWork, forecast_latency, forecast_queue
from tests.two_point_service import two_point_service

FOUR = two_point_service(
    batch=4, input_tokens=100, output_tokens=10, ttft_s=1.0, full_ttft_s=2.5, tpot_s=0.1, full_tpot_s=0.16
)
ONE = two_point_service(batch=1, input_tokens=100, output_tokens=10, ttft_s=1.1, tpot_s=0.1)

TOKENS = st.floats(1, 500)
NEW = st.builds(RemainingWork, TOKENS, TOKENS)
RUNNING = st.builds(RemainingWork, st.floats(0, 500), TOKENS)
TIMES = st.floats(0.001, 10)


@st.composite
def services(draw: st.DrawFn) -> ServiceModel:
    return two_point_service(
        batch=draw(st.integers(1, 6)),
        input_tokens=draw(st.integers(1, 300)),
        output_tokens=draw(st.integers(1, 300)),
        ttft_s=draw(TIMES),
        full_ttft_s=draw(TIMES),
        tpot_s=draw(TIMES),
        full_tpot_s=draw(TIMES),
    )


def test_alone_it_takes_what_the_plan_says() -> None:
    assert forecast_latency(FOUR, (), RemainingWork(100, 10)) == pytest.approx((1.0, 0.1, 1.9))
    assert forecast_latency(ONE, (), RemainingWork(100, 10)) == pytest.approx((1.1, 0.1, 2.0))


def test_a_batch_of_prompts_takes_the_batchs_ttft() -> None:
    """1 s for 100 tokens and 2.5 s for 400: half a second fixed, 5 ms a token."""
    assert FOUR.prompts_s(101) - FOUR.prompts_s(100) == pytest.approx(0.005)
    running = [RemainingWork(100, 10)] * 3
    assert forecast_latency(FOUR, running, RemainingWork(100, 10)).ttft_s == pytest.approx(2.5)
    assert forecast_latency(FOUR, (), RemainingWork(20, 10)).ttft_s == pytest.approx(0.6)


def test_of_a_batch_of_one_the_weights_are_read_for_a_prompt_too() -> None:
    """0.1 s of the 1.1 s, whatever its length."""
    assert ONE.prompts_s(50) == pytest.approx(0.6)


def test_next_to_running_requests_a_token_takes_longer_and_a_share_of_the_prompts_that_follow() -> None:
    """The step with two more sequences: 0.1 s, two thirds of the way to 0.16 s, and of their prompts' 0.5 s a
    tenth each.
    """
    assert forecast_latency(FOUR, [RemainingWork(0, 5)] * 2, RemainingWork(100, 10)).tpot_s == pytest.approx(
        0.1 + 0.04 + 0.1
    )


def test_a_waiting_request_gets_the_slot_that_is_free_first() -> None:
    """On one slot, 5 tokens are left of the running request, then the waiting one takes 1.1 s and nine steps."""
    slot_s, empty_s = forecast_queue(ONE, 1, [[RemainingWork(0, 5)]], [RemainingWork(100, 10)])
    assert (slot_s, empty_s) == pytest.approx((2.5, 2.5))
    assert forecast_queue(ONE, 1, [[RemainingWork(0, 5)], [RemainingWork(0, 2)]], [])[0] == pytest.approx(0.2)
    assert forecast_queue(ONE, 1, [[RemainingWork(0, 5)], []], [])[0] == 0.0


@given(services(), st.lists(RUNNING, max_size=8), NEW, RUNNING)
def test_more_next_to_it_is_never_sooner(
    service: ServiceModel, running: list[RemainingWork], request: RemainingWork, more: RemainingWork
) -> None:
    fewer, with_more = (forecast_latency(service, ahead, request) for ahead in (running, [*running, more]))
    assert all(a <= b + 1e-9 * (1 + b) for a, b in zip(fewer, with_more, strict=True))


@given(
    services(),
    st.integers(1, 6),
    st.lists(st.lists(RUNNING, max_size=6), min_size=1, max_size=3),
    st.lists(NEW, max_size=8),
    st.data(),
)
def test_more_in_front_is_never_sooner(
    service: ServiceModel,
    slots: int,
    replicas: list[list[RemainingWork]],
    waiting: list[RemainingWork],
    data: st.DataObject,
) -> None:
    replicas = [running[:slots] for running in replicas]
    before = forecast_queue(service, slots, replicas, waiting)
    place = data.draw(st.integers(0, len(waiting)))
    longer = forecast_queue(service, slots, replicas, [*waiting[:place], data.draw(NEW), *waiting[place:]])
    assert all(a <= b + 1e-9 * (1 + b) for a, b in zip(before, longer, strict=True))
    one_more = [[*replicas[0], data.draw(RUNNING)][:slots], *replicas[1:]]
    assert before[0] <= forecast_queue(service, slots, one_more, waiting)[0] + 1e-9 * (1 + before[0])
    assert forecast_queue(service, slots, [*replicas, []], waiting)[0] <= before[0] + 1e-9 * (1 + before[0])


@given(services(), st.lists(RUNNING, max_size=5), NEW, st.floats(1, 5), st.floats(1, 5))
def test_slower_is_never_sooner(
    service: ServiceModel, running: list[RemainingWork], request: RemainingWork, prompts: float, steps: float
) -> None:
    usual = forecast_latency(service, (), request)
    slow = forecast_latency(service.slowed(prompts, prompts), (), request)
    assert slow == pytest.approx(tuple(prompts * time_s for time_s in usual))
    slow = forecast_latency(service.slowed(1.0, steps), running, request)
    assert forecast_latency(service, running, request).tpot_s <= slow.tpot_s + 1e-9
