"""Admission of requests that wait for the load of their variant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.load_waits import OneLoad
from fingerprint.service_model import ServiceModel
from planner.admission import AdmissionController, AdmissionPolicy, InFlightRequest, Rejection
from planner.intent import Slo
from planner.pending_loads import LoadsAhead, PendingLoads
from tests.two_point_service import two_point_service

TWO = two_point_service(
    batch=2, input_tokens=10, output_tokens=5, ttft_s=1.0, full_ttft_s=1.5, tpot_s=1.0, full_tpot_s=1.2
)
NEXT_TO_STEPS = OneLoad(load_s=10.0, stops_steps=False)
_LOADS = st.builds(LoadsAhead, st.integers(1, 5), st.floats(0.0, 30.0), st.integers(0, 3))
_SERVED = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 9), st.integers(0, 9)), max_size=5)


def controller_of(slo: Slo, load: OneLoad | None, service: ServiceModel = TWO) -> AdmissionController:
    policy = AdmissionPolicy(slo=slo, service=replace(service, one_load=load), slots=service.largest_batch)
    return AdmissionController(policy)


def at_work(controller: AdmissionController, served: Sequence[tuple[float, int, int]]) -> list[InFlightRequest]:
    """Return requests that run, some of whose tokens were seen."""
    found = list[InFlightRequest]()
    for at_s, tokens, seen in served:
        request = controller.new_request(at_s, 10, tokens)
        controller.record_start(request, tuple(found), at_s)
        controller.record_tokens(request, min(seen, tokens), at_s + 1.0)
        found.append(request)
    return found


def judged(
    controller: AdmissionController, served: Sequence[tuple[float, int, int]], loads: LoadsAhead | None
) -> tuple[Rejection | None, Rejection | None]:
    """Return the judgements of a request that would start, and of one that would wait."""
    running = at_work(controller, served)
    starts, waits = (controller.new_request(25.0, 10, 5) for _ in range(2))
    return (
        controller.check_start(starts, running, 25.0, loads),
        controller.check_queue(waits, [running], running[:1], 25.0, loads),
    )


@given(served=_SERVED, loads=_LOADS, limit_s=st.floats(0.1, 60.0))
def test_a_plan_that_knows_no_loads_counts_none(
    served: list[tuple[float, int, int]], loads: LoadsAhead, limit_s: float
) -> None:
    """To the bit, whatever is being loaded."""
    slo = Slo(ttft_s=limit_s, e2e_s=2 * limit_s)
    assert judged(controller_of(slo, None), served, loads) == judged(controller_of(slo, None), served, None)


@given(served=_SERVED, limit_s=st.floats(0.1, 60.0), stops_steps=st.booleans())
def test_a_request_whose_variant_is_loaded_is_judged_as_one_of_the_base_without_variants(
    served: list[tuple[float, int, int]], limit_s: float, stops_steps: bool
) -> None:
    """To the bit, whatever a load takes."""
    slo = Slo(ttft_s=limit_s, e2e_s=2 * limit_s)
    load = OneLoad(load_s=10.0, stops_steps=stops_steps)
    assert judged(controller_of(slo, load), served, None) == judged(controller_of(slo, None), served, None)


@given(served=_SERVED, loads=_LOADS, limit_s=st.floats(0.1, 60.0), stops_steps=st.booleans())
def test_loads_never_make_a_request_earlier(
    served: list[tuple[float, int, int]], loads: LoadsAhead, limit_s: float, stops_steps: bool
) -> None:
    slo, load = Slo(e2e_s=limit_s), OneLoad(load_s=10.0, stops_steps=stops_steps)
    warm, cold = (judged(controller_of(slo, load), served, one) for one in (None, loads))
    for before, found in zip(warm, cold, strict=True):
        if before is not None:
            assert found is not None
            assert found.forecast_s >= before.forecast_s


@given(
    served=st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5),
    number=st.integers(1, 5),
    limit_s=st.floats(0.1, 9.99),
    stops_steps=st.booleans(),
    limited=st.sampled_from(["ttft_s", "e2e_s"]),
)
def test_one_whose_limit_is_shorter_than_its_load_is_rejected_at_once_next_to_any_other(
    served: list[tuple[float, int, int]], number: int, limit_s: float, stops_steps: bool, limited: str
) -> None:
    controller = controller_of(Slo(**{limited: limit_s}), OneLoad(load_s=10.0, stops_steps=stops_steps))
    for found in judged(controller, served, LoadsAhead(number)):
        assert found is not None
        assert found.forecast_s >= found.loads_s == 10.0 * number
        assert found.late_alone


def test_an_idle_replica_rejects_none_for_its_load() -> None:
    """The request finds out what the load takes, and delays no other."""
    controller = controller_of(Slo(ttft_s=2.0), NEXT_TO_STEPS)
    assert controller.check_start(controller.new_request(0.0, 10, 5), (), 0.0, LoadsAhead(1)) is None


def test_a_load_that_is_nearly_done_is_waited_for() -> None:
    """A prompt of a second, within 2.5 s of the arrival."""
    controller = controller_of(Slo(ttft_s=2.5), NEXT_TO_STEPS)
    running = at_work(controller, [(0.0, 9, 0)])
    for ran_s, is_late in ((8.0, True), (9.5, False), (30.0, False)):
        request = controller.new_request(1.0, 10, 5)
        assert (controller.check_start(request, running, 1.0, LoadsAhead(1, ran_s)) is not None) == is_late


def test_loads_next_to_the_steps_go_on_while_a_request_waits_for_its_turn() -> None:
    """Two requests of five tokens have both slots for 4 to 6 s: a load of 3 s adds nothing, one of 30 does."""
    for load_s, stops_steps, is_late in ((3.0, False, False), (30.0, False, True), (3.0, True, True)):
        controller = controller_of(Slo(ttft_s=8.0), OneLoad(load_s=load_s, stops_steps=stops_steps))
        running = at_work(controller, [(0.0, 5, 1), (0.0, 5, 1)])
        request = controller.new_request(1.0, 10, 5)
        assert (controller.check_queue(request, [running], (), 1.0, LoadsAhead(1)) is not None) == is_late


def test_in_a_queue_the_loads_of_those_before_it_count() -> None:
    controller = controller_of(Slo(ttft_s=25.0), NEXT_TO_STEPS)
    running = at_work(controller, [(0.0, 5, 1), (0.0, 5, 1)])
    for waiting, is_late in ((1, False), (2, True)):
        request = controller.new_request(1.0, 10, 5)
        found = controller.check_queue(request, [running], (), 1.0, LoadsAhead(1, waiting=waiting))
        assert (found is not None) == is_late


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("stops_steps", [False, True])
@pytest.mark.parametrize("queues", [False, True])
def test_a_rejected_request_that_is_sent_again_when_it_says_is_accepted(
    queues: bool, stops_steps: bool, tokens: int
) -> None:
    """Next to a short answer that waits for a load of 10 s, a variant would have its own load in 20, not 15."""
    controller = controller_of(Slo(ttft_s=15.0), OneLoad(load_s=10.0, stops_steps=stops_steps))
    held = controller.new_request(0.0, 10, tokens)
    controller.record_start(held, (), 0.0, LoadsAhead(1))

    def check(now_s: float) -> Rejection | None:
        request, loads = controller.new_request(now_s, 10, 5), LoadsAhead(2, now_s)
        if queues:
            return controller.check_queue(request, [[held]], (), now_s, loads)
        return controller.check_start(request, [held], now_s, loads)

    found = check(1.0)
    assert found is not None
    assert not found.late_alone
    assert check(1.0 + math.ceil(found.retry_after_s)) is None
    assert check(1.0 + math.floor(found.retry_after_s) - 1.0) is not None


@pytest.mark.parametrize("stops_steps", [False, True])
@pytest.mark.parametrize(("since_s", "least_s"), [(0.0, 9.0), (-30.0, 0.0)])
def test_a_replica_whose_request_waits_for_its_load_is_idle_no_sooner(
    stops_steps: bool, since_s: float, least_s: float
) -> None:
    """Late alone, it is accepted by an idle replica: after 9 s of a load, at once after one that is overdue."""
    controller = controller_of(Slo(ttft_s=5.0), OneLoad(load_s=10.0, stops_steps=stops_steps))
    held = controller.new_request(since_s, 10, 1)
    controller.record_start(held, (), since_s, LoadsAhead(1))
    found = controller.check_start(controller.new_request(1.0, 10, 5), [held], 1.0, LoadsAhead(2, 1.0 - since_s))
    assert found is not None
    assert found.late_alone
    assert least_s <= found.retry_after_s <= least_s + 3.0


def test_a_load_is_in_place_of_those_that_a_prompt_counts_on_average() -> None:
    """Prompts of 5 s, of which 4 are for loads: with a load of its own, of 10 s, a first token is there in 11."""
    service = two_point_service(
        batch=2, input_tokens=10, output_tokens=5, ttft_s=5.0, tpot_s=0.1, full_ttft_s=10.0
    )
    load = OneLoad(load_s=10.0, stops_steps=True, counted_s=4.0)
    controller = controller_of(Slo(ttft_s=0.5), load, service)
    running = at_work(controller, [(0.0, 9, 1)])
    for loads, forecast_s in ((None, 5.0), (LoadsAhead(1), 11.0)):
        controller = controller_of(Slo(ttft_s=0.5), load, service)
        found = controller.check_start(controller.new_request(1.0, 10, 5), running, 1.0, loads)
        assert found is not None
        assert found.forecast_s == pytest.approx(forecast_s)


@given(load_s=st.floats(0.0, 100.0), stops_steps=st.booleans(), more=st.floats(0.5, 2.0))
def test_what_is_learned_of_prompts_has_no_load(load_s: float, stops_steps: bool, more: float) -> None:
    """A request that waits for its load leaves what is known of prompts as one that waits for none."""
    load = OneLoad(load_s=10.0, stops_steps=stops_steps)
    cold, warm = (controller_of(Slo(ttft_s=0.1), load) for _ in range(2))
    for controller, loads, waits_s in ((cold, LoadsAhead(1), load_s), (warm, None, 0.0)):
        request = controller.new_request(0.0, 10, 5)
        controller.record_start(request, (), 0.0, loads)
        controller.record_loaded(request, (), waits_s)
        controller.record_tokens(request, 1, waits_s + more)
    one, other = (
        controller.check_start(controller.new_request(500.0, 10, 5), at_work(controller, [(499.0, 5, 1)]), 500.0)
        for controller in (cold, warm)
    )
    assert one is not None
    assert other is not None
    assert one.forecast_s == pytest.approx(other.forecast_s)


def test_what_loads_take_is_learned() -> None:
    """Loads take three times as long as planned: of each two, the second begins when the first has ended."""
    controller, pending = controller_of(Slo(ttft_s=0.1), NEXT_TO_STEPS), PendingLoads()
    for number in range(100):
        at_s = 100.0 * number
        pending.order("a", at_s)
        pending.order("b", at_s + 6.0)
        for name, end_s in (("a", at_s + 30.0), ("b", at_s + 60.0)):
            took_s = pending.end(name, end_s)
            assert took_s is not None
            controller.record_load(took_s)
    running = at_work(controller, [(1e5, 9, 1)])
    found = controller.check_start(controller.new_request(1e5 + 1, 10, 5), running, 1e5 + 1, LoadsAhead(1))
    assert found is not None
    assert found.loads_s == pytest.approx(30.0, rel=0.02)


@pytest.mark.parametrize("load", [None, OneLoad(load_s=0.0, stops_steps=False)])
def test_a_plan_whose_loads_take_no_time_learns_nothing_of_them(load: OneLoad | None) -> None:
    controller = controller_of(Slo(ttft_s=0.1), load)
    controller.record_load(30.0)
    running = at_work(controller, [(1.0, 9, 1)])
    found = controller.check_start(controller.new_request(2.0, 10, 5), running, 2.0, LoadsAhead(1))
    assert found is not None
    assert found.loads_s == 0.0


def test_of_a_request_that_has_not_started_no_load_is_noted() -> None:
    controller = controller_of(Slo(ttft_s=0.1), NEXT_TO_STEPS)
    request = controller.new_request(1.0, 10, 5)
    controller.record_loaded(request, (), 50.0)
    assert (request.started_s, request.held) == (None, None)


def test_a_wait_that_was_not_foreseen_is_in_no_prompt() -> None:
    """A worker that was restarted has lost a variant that was loaded: nothing is learned of its load."""
    controller = controller_of(Slo(ttft_s=0.1), NEXT_TO_STEPS)
    request = controller.new_request(0.0, 10, 5)
    controller.record_start(request, (), 0.0)
    controller.record_loaded(request, (), 60.0)
    assert request.started_s == 60.0


def test_a_request_that_waits_for_its_load_is_before_no_prompt_where_loads_stop_no_step() -> None:
    """The request is in no step yet; where loads stop the steps its prompt is among those of the next one."""
    for stops_steps, forecast_s in ((False, 1.0), (True, 1.5)):
        controller = controller_of(Slo(ttft_s=0.1), OneLoad(load_s=10.0, stops_steps=stops_steps))
        held = controller.new_request(0.0, 10, 5)
        controller.record_start(held, (), 0.0, LoadsAhead(1))
        found = controller.check_start(controller.new_request(5.0, 10, 5), [held], 5.0)
        assert found is not None
        assert found.forecast_s == pytest.approx(forecast_s)
