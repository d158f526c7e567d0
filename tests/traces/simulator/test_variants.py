"""Replay of variants' requests: counts and waiting times by hand, and laws."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.variant_routing import (
    VARIANT_POLICIES,
    Admission,
    DeltaZip,
    FirstComeFirstServed,
    PreemptingDeltaZip,
    WaitingRequest,
    make_variant_policy,
)
from tests.golden_words import Golden
from traces.simulator.variant_fleet import VariantFleet
from traces.simulator.variants import StepCost, VariantArrival, VariantWorkers, replay_variants


def workers(**fields) -> VariantWorkers:
    kept = {"num_workers": 1, "slots": 2, "max_loaded": 2, "variant_bytes": 100, "load_bytes_per_s": 1000.0}
    return VariantWorkers(**kept | fields)


def arrivals(*rows: tuple[float, str], service_s: float = 1.0) -> list[VariantArrival]:
    return [VariantArrival(arrived_s=at_s, variant=name, service_s=service_s) for at_s, name in rows]


def test_a_cold_variant_waits_for_its_load_once() -> None:
    replay = replay_variants(arrivals((0.0, "a"), (0.04, "a"), (5.0, "a")), workers())
    assert (replay.loads, replay.evictions, replay.hits) == (1, 0, 2)
    assert replay.waiting_s == pytest.approx((0.1, 0.06, 0.0))
    assert replay.hit_rate == pytest.approx(2 / 3)


def test_a_slot_is_waited_for_and_the_load_hidden_behind_it() -> None:
    """ "b" is loaded while "a" runs."""
    trace = arrivals((0.0, "a"), (0.5, "b"))
    hidden = replay_variants(trace, workers(slots=1))
    assert hidden.waiting_s == pytest.approx((0.1, 0.6))
    in_turn = replay_variants(trace, workers(slots=1, max_loaded=1))
    assert in_turn.waiting_s == pytest.approx((0.1, 0.7))
    assert in_turn.evictions == 1


def test_followers_of_a_running_variant_pass_but_not_first_come_first_served() -> None:
    trace = arrivals((0.0, "a"), (0.2, "b"), (0.3, "a"))
    ours = replay_variants(trace, workers(slots=1))
    assert ours.waiting_s == pytest.approx((0.1, 1.1, 0.0))
    fcfs = replay_variants(trace, workers(slots=1), FirstComeFirstServed())
    assert fcfs.waiting_s == pytest.approx((0.1, 0.9, 1.8))


def test_as_a_parent_ends_its_followers_are_preempted_or_drain() -> None:
    """ "b" waits for the slot of "a", which a second "a" shares from 0.5 s on."""
    trace = arrivals((0.0, "a"), (0.4, "b"), (0.5, "a"))
    fleet = workers(slots=1, load_bytes_per_s=1e12, resume_s=0.25)
    drained = replay_variants(trace, fleet, DeltaZip())
    assert drained.latency_s == pytest.approx((1.0, 1.1 + 1.0, 1.0))
    preempted = replay_variants(trace, fleet, PreemptingDeltaZip())
    assert preempted.latency_s == pytest.approx((1.0, 0.6 + 1.0, 1.5 + 0.5 + 0.25))
    assert preempted.waiting_s == pytest.approx((0.0, 0.6, 0.0), abs=1e-9)
    assert (drained.preemptions, preempted.preemptions) == (0, 1)


def test_a_closed_loop_sends_the_next_request_as_one_is_complete() -> None:
    trace = arrivals((0.0, "a"), (0.0, "b"), (9.0, "a"), (9.0, "a"))
    found = replay_variants(trace, workers(slots=1, load_bytes_per_s=1e12), clients=1)
    assert found.latency_s == pytest.approx((1.0,) * 4)
    assert found.ended_s == pytest.approx(4.0)
    with pytest.raises(ConfigError, match="client"):
        replay_variants(trace, workers(), clients=0)


@given(
    rows=st.lists(st.tuples(st.floats(0, 50), st.sampled_from("abcdefgh")), max_size=60),
    num_workers=st.integers(1, 3),
    slots=st.integers(1, 3),
    spare=st.integers(0, 3),
)
def test_laws(rows, num_workers, slots, spare) -> None:
    fleet = workers(num_workers=num_workers, slots=slots, max_loaded=slots + spare)
    for policy in (None, PreemptingDeltaZip(), *(make() for make in VARIANT_POLICIES.values())):
        replay = replay_variants(arrivals(*rows), fleet, policy)
        assert len(replay.waiting_s) == len(rows)
        assert all(waited_s >= 0 for waited_s in replay.waiting_s)
        assert replay.loads >= len({name for _, name in rows})
        assert replay.loads - replay.evictions <= num_workers * (slots + spare)
        assert replay.hits + replay.loads >= len(rows)
        served_s = [took_s - waited_s for took_s, waited_s in zip(replay.latency_s, replay.waiting_s, strict=True)]
        assert all(one_s >= 1.0 - 1e-9 for one_s in served_s)
        if not isinstance(policy, PreemptingDeltaZip):
            assert replay.preemptions == 0
            assert replay.latency_s == pytest.approx([waited_s + 1.0 for waited_s in replay.waiting_s])


@given(
    rows=st.lists(st.tuples(st.floats(0, 8), st.sampled_from("abcdefgh")), min_size=20, max_size=80),
    num_workers=st.integers(1, 3),
    slots=st.integers(1, 3),
    spare=st.integers(0, 3),
    name=st.sampled_from(sorted(VARIANT_POLICIES)),
)
def test_requests_that_need_a_slot_while_none_is_free_are_passed_without_a_change(
    rows, num_workers, slots, spare, name
) -> None:
    """In an overload, with waits beyond those that let no request pass; equal to the last bit."""
    fleet = workers(num_workers=num_workers, slots=slots, max_loaded=slots + spare, max_outstanding=4)
    passed = replay_variants(arrivals(*rows), fleet, make_variant_policy(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VariantFleet, "_runnable", lambda fleet, workers: None)  # every request is offered a worker
        assert replay_variants(arrivals(*rows), fleet, make_variant_policy(name)) == passed


def test_a_request_that_needs_a_slot_is_not_offered_a_worker_while_none_is_free() -> None:
    """The policy is asked once for each request, not for all that wait at each arrival and end."""
    asked: list[str] = []

    class Counting(FirstComeFirstServed):
        def may_be_passed(self, request: WaitingRequest, now_s: float) -> bool:
            return True

        def choose(self, variant: str, *arguments: Any, **options: Any) -> Admission | None:
            asked.append(variant)
            return super().choose(variant, *arguments, **options)

    rows = [(0.001 * number, f"v{number}") for number in range(200)]
    replay = replay_variants(arrivals(*rows), workers(slots=1), Counting())
    assert len(replay.waiting_s) == 200
    assert len(asked) == 200


def test_requests_that_run_together_share_the_steps() -> None:
    """Two of one variant: each step takes 1.5 times as long while both run; of two variants, twice as long."""
    step = StepCost(fixed_s=0.01, per_request_s=0.005, per_variant_s=0.005)
    fleet = workers(step=step, load_bytes_per_s=1e12)
    same = replay_variants(arrivals((0.0, "a"), (0.5, "a")), fleet)
    assert same.latency_s == pytest.approx((0.5 + 0.5 * 1.5, 0.5 * 1.5 + 0.5))
    two = replay_variants(arrivals((0.0, "a"), (0.5, "b")), fleet)
    assert two.latency_s == pytest.approx((0.5 + 0.5 * 2, 0.5 * 2 + 0.5))


def test_a_step_grows_with_requests_times_variants() -> None:
    step = StepCost(fixed_s=1.0, per_request_s=0.1, per_variant_s=0.2, per_both_s=0.01)
    assert step.slowdown(1, 1) == 1.0
    assert step.slowdown(4, 2) == pytest.approx(1.0 + 0.3 + 0.2 + 0.07)


def test_a_request_that_waits_for_its_load_slows_none_down() -> None:
    fleet = workers(step=StepCost(fixed_s=0.01, per_request_s=0.01), load_bytes_per_s=100.0)
    replay = replay_variants(arrivals((0.0, "a"), (1.5, "b")), fleet)
    assert replay.latency_s == pytest.approx((2.0, 2.0))


def test_a_hot_variant_has_all_workers() -> None:
    """Packed on one worker it takes many times as long; the other one has nothing to do."""
    fleet = workers(num_workers=2, slots=8, max_loaded=32, step=StepCost(fixed_s=0.01, per_request_s=0.01))
    rng = random.Random(1)
    arrived_s = itertools.accumulate(rng.expovariate(1.4) for _ in range(300))
    trace = arrivals(*((at_s, "a") for at_s in arrived_s))
    alone, packed, turns, ours = (
        statistics.fmean(replay_variants(trace, of, make_variant_policy(policy)).latency_s)
        for of, policy in (
            (replace(fleet, num_workers=1), "fcfs"),
            (fleet, "busiest-loaded"),
            (fleet, "round-robin"),
            (fleet, "least-loaded"),
        )
    )
    assert packed == pytest.approx(alone)
    assert packed > 5 * turns
    assert ours < 1.1 * turns


def test_impossible_steps(golden: Golden) -> None:
    for fields in (
        {"fixed_s": 0.0},
        {"fixed_s": 1.0, "per_request_s": -1.0},
        {"fixed_s": 1.0, "per_both_s": -1.0},
    ):
        with golden.raises("simulator-errors", ConfigError):
            StepCost(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"num_workers": 0}, {"max_outstanding": 0}, {"load_bytes_per_s": 0.0}, {"variant_bytes": -1}, {"slots": 3}],
)
def test_impossible_workers(fields) -> None:
    with pytest.raises(ConfigError):
        replay_variants([], workers(**fields))
