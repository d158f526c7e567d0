"""Rejection of late requests, and what the admission controller learns."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from fingerprint.service_model import ServiceModel
from planner.admission import AdmissionController, AdmissionPolicy, InFlightRequest, LearnedRatio
from planner.intent import Slo
from tests.golden_words import Golden
from tests.two_point_service import two_point_service

# One at a time, a second for a prompt of any length and for each token.
ONE = two_point_service(batch=1, input_tokens=1, output_tokens=5, ttft_s=1.0, tpot_s=1.0)
TWO = two_point_service(
    batch=2, input_tokens=10, output_tokens=5, ttft_s=1.0, full_ttft_s=1.5, tpot_s=1.0, full_tpot_s=1.2
)


def controller_of(slo: Slo, service: ServiceModel) -> AdmissionController:
    return AdmissionController(AdmissionPolicy(slo=slo, service=service, slots=service.largest_batch))


def running(controller: AdmissionController, now_s: float, tokens: int, **more: bool) -> InFlightRequest:
    request = controller.new_request(now_s, 1, tokens, **more)
    controller.record_start(request, (), now_s)
    return request


@given(
    st.floats(0.001, 100),
    st.floats(0.001, 100),
    st.floats(0.001, 100),
    st.integers(1, 1000),
    st.floats(0.001, 100),
)
def test_a_request_that_finds_an_idle_replica_is_never_rejected(
    ttft_s: float, tpot_s: float, limit_s: float, tokens: int, times: float
) -> None:
    """Whatever the plan says, and whatever was learned."""
    service = two_point_service(batch=3, input_tokens=9, output_tokens=9, ttft_s=ttft_s, tpot_s=tpot_s)
    controller = controller_of(Slo(ttft_s=limit_s, tpot_s=limit_s, e2e_s=limit_s), service)
    for now_s in (0.0, 1e4):
        request = controller.new_request(now_s, 9, tokens)
        assert controller.check_start(request, (), now_s) is None
        controller.record_start(request, (), now_s)
        controller.record_tokens(request, 1, now_s + times)
        controller.record_tokens(request, tokens, now_s + times * (tokens + 1))
        controller.record_end(request, now_s + times * (tokens + 1))


@pytest.mark.parametrize(("most_at_once", "is_late"), [(None, False), (2.2, False), (1.4, True), (0.3, True)])
def test_one_waits_where_no_more_find_slots_for_their_variants(most_at_once: float | None, is_late: bool) -> None:
    """A slot of two is taken for 6 s; a request of its own takes 5.8 s next to it."""
    controller = controller_of(Slo(e2e_s=8.0), replace(TWO, most_at_once=most_at_once))
    request, before = controller.new_request(0.0, 10, 5), running(controller, 0.0, 5)
    assert (controller.check_queue(request, [[before]], (), 0.0) is not None) == is_late


@pytest.mark.parametrize(
    ("slo", "limit", "forecast_s"),
    [
        pytest.param(Slo(e2e_s=8.0), None, 0.0, id="just in time"),
        pytest.param(Slo(e2e_s=7.5), "e2e", 8.0, id="last token at 8 s"),
        pytest.param(Slo(ttft_s=5.5), "ttft", 6.0, id="first token at 6 s"),
        pytest.param(Slo(ttft_s=5.5, e2e_s=3.0), "e2e", 8.0, id="the limit that is missed by most"),
        pytest.param(Slo(tpot_s=0.9), "tpot", 1.0, id="steps too slow"),
    ],
)
def test_one_that_would_wait_is_judged_by_those_before_it(slo: Slo, limit: str | None, forecast_s: float) -> None:
    """Five tokens take 5 s of the one slot; then three of one's own."""
    controller = controller_of(slo, ONE)
    late = controller.check_queue(controller.new_request(0.0, 1, 3), [[running(controller, 0.0, 5)]], (), 0.0)
    assert (late and late.limit) == limit
    if late is not None:
        assert late.forecast_s == pytest.approx(forecast_s)
        assert late.late_alone is (limit == "tpot")


def test_one_that_could_not_keep_it_alone_is_to_be_sent_again_when_none_is_there() -> None:
    controller = controller_of(Slo(e2e_s=2.0), ONE)
    late = controller.check_queue(controller.new_request(0.0, 1, 3), [[running(controller, 0.0, 5)]], (), 0.0)
    assert late is not None
    assert late.late_alone
    assert late.retry_after_s == pytest.approx(5.0)


def test_retry_is_when_enough_of_what_is_before_it_is_done() -> None:
    controller = controller_of(Slo(e2e_s=6.0), ONE)
    late = controller.check_queue(controller.new_request(0.0, 1, 3), [[running(controller, 0.0, 5)]], (), 0.0)
    assert late is not None
    assert not late.late_alone
    assert late.retry_after_s == pytest.approx(2.0)


def test_what_is_behind_a_running_one_counts() -> None:
    controller = controller_of(Slo(e2e_s=6.0), ONE)
    seen, unseen = running(controller, 0.0, 5), running(controller, 0.0, 5, is_streamed=False)
    controller.record_tokens(seen, 1, 1.0)
    controller.record_tokens(seen, 2, 3.0)
    for request in (seen, unseen):
        assert controller.check_queue(controller.new_request(3.0, 1, 3), [[request]], (), 3.0) is None
    silent = running(controller, 0.0, 5)  # a stream of which nothing has arrived: all of its answer is left
    assert controller.check_queue(controller.new_request(3.0, 1, 3), [[silent]], (), 3.0) is not None


def test_at_its_turn_the_wait_counts_even_if_no_other_runs() -> None:
    controller = controller_of(Slo(e2e_s=6.0), ONE)
    request = controller.new_request(0.0, 1, 3)
    assert controller.check_start(request, (), 3.0) is None
    late = controller.check_start(request, (), 3.1)
    assert late is not None
    assert late.forecast_s == pytest.approx(6.1)


def test_a_step_with_another_request_can_be_too_slow() -> None:
    controller = controller_of(Slo(tpot_s=1.1), TWO)
    late = controller.check_start(controller.new_request(0.0, 10, 3), [running(controller, 0.0, 3)], 0.0)
    assert late is not None
    assert late.limit == "tpot"
    one_token = controller.new_request(0.0, 10, 1)
    assert controller.check_start(one_token, [running(controller, 0.0, 3)], 0.0) is None, "it has no TPOT"


def test_a_bound_far_beyond_what_answers_need_keeps_none_out() -> None:
    """Answers have the planned five tokens, their clients allow 500 each: with another running they take 8 s."""
    controller = controller_of(Slo(e2e_s=12.0), TWO)
    for now_s in range(0, 1000, 10):
        request = running(controller, float(now_s), 500)
        controller.record_tokens(request, 1, now_s + 1.0)
        controller.record_tokens(request, 4, now_s + 5.0)
        controller.record_end(request, now_s + 5.0)
    other = running(controller, 2000.0, 500)
    assert controller.check_start(controller.new_request(2000.0, 1, 500), [other], 2000.0) is None


def test_answers_that_use_all_of_a_bound_far_beyond_the_plan_are_believed() -> None:
    controller = controller_of(Slo(e2e_s=60.0), TWO)
    for now_s in range(0, 100_000, 1000):
        request = running(controller, float(now_s), 200)
        controller.record_tokens(request, 1, now_s + 1.0)
        controller.record_tokens(request, 199, now_s + 200.0)
        controller.record_end(request, now_s + 200.0)
    other = running(controller, 200_000.0, 200)
    late = controller.check_start(controller.new_request(200_000.0, 1, 200), [other], 200_000.0)
    assert late is not None
    assert late.forecast_s > 200


@given(st.lists(st.floats(0, 1e9), max_size=60))
def test_a_ratio_stays_within_its_bounds(values: list[float]) -> None:
    ratio = LearnedRatio()
    for value in values:
        ratio = ratio.updated(value)
    assert 1 / 8 <= ratio.mean <= 8
    assert ratio.mean <= ratio.high


def test_a_ratio_converges_to_what_is_seen() -> None:
    ratio = LearnedRatio()
    for _ in range(100):
        ratio = ratio.updated(3.0)
    assert ratio.mean == pytest.approx(3.0, rel=0.05)
    assert ratio.high == pytest.approx(3.0, rel=0.1)


def _serve(
    controller: AdmissionController, true: ServiceModel, per_s: float, seed: int, requests: int = 400
) -> tuple[int, int, int]:
    """Serve by a replica of other true times; return how many arrived, were served, and kept 12 s."""
    rng, order = random.Random(seed), count()
    now_s, served, kept = 0.0, 0, 0
    busy: list[InFlightRequest] = []
    line: list[InFlightRequest] = []
    ends: list[tuple[float, int, InFlightRequest]] = []

    def begin(request: InFlightRequest, at_s: float) -> None:
        controller.record_start(request, busy, at_s)
        busy.append(request)
        took_s = true.prompts_s(1) + (request.output_tokens - 1) * true.loaded_step_of(len(busy))
        heapq.heappush(ends, (at_s + took_s, next(order), request))

    def until(at_s: float) -> None:
        nonlocal served, kept
        while ends and ends[0][0] <= at_s:
            end_s, _, request = heapq.heappop(ends)
            busy.remove(request)
            assert request.started_s is not None
            controller.record_tokens(request, 1, request.started_s + true.prompts_s(1))
            controller.record_end(request, end_s, int(request.output_tokens))
            served += 1
            kept += end_s - request.arrived_s <= 12.0
            while line and len(busy) < true.largest_batch:
                turn = line.pop(0)
                if controller.check_start(turn, busy, end_s) is None:
                    begin(turn, end_s)

    for _ in range(requests):
        now_s += rng.expovariate(per_s)
        until(now_s)
        request = controller.new_request(now_s, 1, rng.randint(1, 9))
        if not line and len(busy) < true.largest_batch:
            if controller.check_start(request, busy, now_s) is None:
                begin(request, now_s)
        elif controller.check_queue(request, [busy], line, now_s) is None:
            line.append(request)
    until(now_s + 1e6)
    return requests, served, kept


@pytest.mark.parametrize("times", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("service", [ONE, TWO])
def test_however_wrong_the_plan_under_twice_what_is_served_most_of_the_accepted_keep_it(
    service: ServiceModel, times: float
) -> None:
    """The plan's times are a quarter, the whole, and four times of the true ones.

    Without rejection the queue grows to the end, and hardly any request keeps it.
    """
    planned, per_s = controller_of(Slo(e2e_s=12.0), service.slowed(times, times)), 0.4 * service.largest_batch
    asked, served, kept = _serve(planned, service, per_s, seed=1)
    assert kept > 0.85 * served
    assert kept > 0.35 * asked
    none_is_late = controller_of(Slo(e2e_s=1e9), service)
    _, all_served, few = _serve(none_is_late, service, per_s, seed=1)
    assert all_served == asked
    assert few < 0.2 * asked


def test_below_what_is_served_next_to_none_is_rejected() -> None:
    asked, served, _ = _serve(controller_of(Slo(e2e_s=40.0), TWO), TWO, 0.15, seed=2)
    assert served > 0.98 * asked


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"service": replace(ONE, output_tokens=0.0)}])
def test_a_policy_that_cannot_be(wrong: dict[str, Any], golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        AdmissionPolicy(**({"slo": Slo(e2e_s=1.0), "service": ONE, "slots": 1} | wrong))
