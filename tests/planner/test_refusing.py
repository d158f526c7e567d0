"""Rejection of late requests, and how the judge learns."""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.intent import Slo
from planner.lateness import Pace
from planner.refusing import Flight, Judge, Ratio

# One at a time, a second for a prompt of any length and for each token.
ONE = Pace(slots=1, input_tokens=1, output_tokens=5, ttft_s=1.0, ttft_full_s=1.0, tpot_s=1.0, tpot_full_s=1.0)
TWO = Pace(slots=2, input_tokens=10, output_tokens=5, ttft_s=1.0, ttft_full_s=1.5, tpot_s=1.0, tpot_full_s=1.2)


def running(judge: Judge, now_s: float, tokens: int, **more: bool) -> Flight:
    flight = judge.flight(now_s, 1, tokens, **more)
    judge.sent(flight, (), now_s)
    return flight


@given(
    st.floats(0.001, 100),
    st.floats(0.001, 100),
    st.floats(0.001, 100),
    st.integers(1, 1000),
    st.floats(0.001, 100),
)
def test_who_finds_an_idle_replica_is_never_refused(
    ttft_s: float, tpot_s: float, limit_s: float, tokens: int, times: float
) -> None:
    """Whatever the plan says, and whatever was learned."""
    pace = Pace(
        slots=3, input_tokens=9, output_tokens=9,
        ttft_s=ttft_s, ttft_full_s=ttft_s, tpot_s=tpot_s, tpot_full_s=tpot_s,
    )  # fmt: skip
    judge = Judge(Slo(ttft_s=limit_s, tpot_s=limit_s, e2e_s=limit_s), pace)
    for now_s in (0.0, 1e4):
        flight = judge.flight(now_s, 9, tokens)
        assert judge.joins(flight, (), now_s) is None
        judge.sent(flight, (), now_s)
        judge.came(flight, 1, now_s + times)
        judge.came(flight, tokens, now_s + times * (tokens + 1))
        judge.ended(flight, now_s + times * (tokens + 1))


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
def test_who_would_wait_is_judged_by_who_is_before(slo: Slo, limit: str | None, forecast_s: float) -> None:
    """Five tokens take 5 s of the one slot; then three of one's own."""
    judge = Judge(slo, ONE)
    late = judge.waits(judge.flight(0.0, 1, 3), [[running(judge, 0.0, 5)]], (), 0.0)
    assert (late and late.limit) == limit
    if late is not None:
        assert late.forecast_s == pytest.approx(forecast_s)
        assert late.alone is (limit == "tpot")


def test_one_who_could_not_keep_it_alone_is_told_so_and_to_come_when_nobody_is_there() -> None:
    judge = Judge(Slo(e2e_s=2.0), ONE)
    late = judge.waits(judge.flight(0.0, 1, 3), [[running(judge, 0.0, 5)]], (), 0.0)
    assert late is not None
    assert late.alone
    assert late.retry_s == pytest.approx(5.0)


def test_retry_is_when_enough_of_what_is_before_it_is_done() -> None:
    judge = Judge(Slo(e2e_s=6.0), ONE)
    late = judge.waits(judge.flight(0.0, 1, 3), [[running(judge, 0.0, 5)]], (), 0.0)
    assert late is not None
    assert not late.alone
    assert late.retry_s == pytest.approx(2.0)


def test_what_is_behind_a_running_one_counts() -> None:
    judge = Judge(Slo(e2e_s=6.0), ONE)
    seen, unseen = running(judge, 0.0, 5), running(judge, 0.0, 5, streams=False)
    judge.came(seen, 1, 1.0)
    judge.came(seen, 2, 3.0)
    for flight in (seen, unseen):
        assert judge.waits(judge.flight(3.0, 1, 3), [[flight]], (), 3.0) is None
    silent = running(judge, 0.0, 5)  # a stream of which nothing has arrived: all of its answer is left
    assert judge.waits(judge.flight(3.0, 1, 3), [[silent]], (), 3.0) is not None


def test_when_its_turn_comes_the_wait_counts_even_if_nobody_is_beside() -> None:
    judge = Judge(Slo(e2e_s=6.0), ONE)
    flight = judge.flight(0.0, 1, 3)
    assert judge.joins(flight, (), 3.0) is None
    late = judge.joins(flight, (), 3.1)
    assert late is not None
    assert late.forecast_s == pytest.approx(6.1)


def test_a_step_beside_others_can_be_too_slow() -> None:
    judge = Judge(Slo(tpot_s=1.1), TWO)
    late = judge.joins(judge.flight(0.0, 10, 3), [running(judge, 0.0, 3)], 0.0)
    assert late is not None
    assert late.limit == "tpot"
    assert judge.joins(judge.flight(0.0, 10, 1), [running(judge, 0.0, 3)], 0.0) is None, "one token has no TPOT"


def test_a_bound_far_beyond_what_answers_need_keeps_nobody_out() -> None:
    """Answers have the planned five tokens, their clients allow 500 each: with another running they take 8 s."""
    judge = Judge(Slo(e2e_s=12.0), TWO)
    for now_s in range(0, 1000, 10):
        flight = running(judge, float(now_s), 500)
        judge.came(flight, 1, now_s + 1.0)
        judge.came(flight, 4, now_s + 5.0)
        judge.ended(flight, now_s + 5.0)
    other = running(judge, 2000.0, 500)
    assert judge.joins(judge.flight(2000.0, 1, 500), [other], 2000.0) is None


def test_who_uses_all_of_a_bound_far_beyond_the_plan_is_believed() -> None:
    judge = Judge(Slo(e2e_s=60.0), TWO)
    for now_s in range(0, 100_000, 1000):
        flight = running(judge, float(now_s), 200)
        judge.came(flight, 1, now_s + 1.0)
        judge.came(flight, 199, now_s + 200.0)
        judge.ended(flight, now_s + 200.0)
    other = running(judge, 200_000.0, 200)
    late = judge.joins(judge.flight(200_000.0, 1, 200), [other], 200_000.0)
    assert late is not None
    assert late.forecast_s > 200


@given(st.lists(st.floats(0, 1e9), max_size=60))
def test_a_ratio_stays_within_its_bounds(values: list[float]) -> None:
    ratio = Ratio()
    for value in values:
        ratio = ratio.seen(value)
    assert 1 / 8 <= ratio.mean <= 8
    assert ratio.mean <= ratio.high


def test_a_ratio_comes_to_what_is_seen() -> None:
    ratio = Ratio()
    for _ in range(100):
        ratio = ratio.seen(3.0)
    assert ratio.mean == pytest.approx(3.0, rel=0.05)
    assert ratio.high == pytest.approx(3.0, rel=0.1)


def _serve(judge: Judge, true: Pace, per_s: float, seed: int, requests: int = 400) -> tuple[int, int, int]:
    """Serve by a replica whose true pace is another; return how many arrived, were served, and kept 12 s."""
    rng, order = random.Random(seed), count()
    now_s, served, kept = 0.0, 0, 0
    busy: list[Flight] = []
    line: list[Flight] = []
    ends: list[tuple[float, int, Flight]] = []

    def begin(flight: Flight, at_s: float) -> None:
        judge.sent(flight, busy, at_s)
        busy.append(flight)
        took_s = true.prompt_s(1) + (flight.output_tokens - 1) * true.step_s(len(busy))
        heapq.heappush(ends, (at_s + took_s, next(order), flight))

    def until(at_s: float) -> None:
        nonlocal served, kept
        while ends and ends[0][0] <= at_s:
            end_s, _, flight = heapq.heappop(ends)
            busy.remove(flight)
            assert flight.sent_s is not None
            judge.came(flight, 1, flight.sent_s + true.prompt_s(1))
            judge.ended(flight, end_s, int(flight.output_tokens))
            served += 1
            kept += end_s - flight.since_s <= 12.0
            while line and len(busy) < judge.pace.slots:
                turn = line.pop(0)
                if judge.joins(turn, busy, end_s) is None:
                    begin(turn, end_s)

    for _ in range(requests):
        now_s += rng.expovariate(per_s)
        until(now_s)
        flight = judge.flight(now_s, 1, rng.randint(1, 9))
        if not line and len(busy) < judge.pace.slots:
            if judge.joins(flight, busy, now_s) is None:
                begin(flight, now_s)
        elif judge.waits(flight, [busy], line, now_s) is None:
            line.append(flight)
    until(now_s + 1e6)
    return requests, served, kept


@pytest.mark.parametrize("times", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("pace", [ONE, TWO])
def test_however_wrong_the_plan_under_twice_what_is_served_most_of_the_accepted_keep_it(
    pace: Pace, times: float
) -> None:
    """The plan's times are a quarter, the whole, and four times of the true ones.

    Without rejection the queue grows to the end, and hardly any request keeps it.
    """
    asked, served, kept = _serve(Judge(Slo(e2e_s=12.0), pace.slowed(times, times)), pace, 0.4 * pace.slots, seed=1)
    assert kept > 0.85 * served
    assert kept > 0.35 * asked
    nobody_is_late = Judge(Slo(e2e_s=1e9), pace)
    _, all_served, few = _serve(nobody_is_late, pace, 0.4 * pace.slots, seed=1)
    assert all_served == asked
    assert few < 0.2 * asked


def test_below_what_is_served_next_to_nobody_is_refused() -> None:
    asked, served, _ = _serve(Judge(Slo(e2e_s=40.0), TWO), TWO, 0.15, seed=2)
    assert served > 0.98 * asked
