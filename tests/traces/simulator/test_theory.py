"""Queueing theory: waits that have closed forms, and laws that hold whatever the policy."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.md1 import md1_wait_cdf
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.worlds import deploy_all, limits, second_per_step, serve
from traces.request import Request
from traces.simulator.scenario import NodeFails, NodeReturns, Remove, Service

_REQUESTS = 100_000


def _poisson(rate_per_s: float, count: int, seed: int, output_tokens: int = 1) -> list[Request]:
    rng, now_s, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate_per_s)
        requests.append(Request(now_s, 1, output_tokens))
    return requests


def _mean_with_error(values: np.ndarray) -> tuple[float, float]:
    """Mean, and its standard error from 50 batches (waits that follow one another are alike)."""
    batches = [part.mean() for part in np.array_split(values, 50)]
    return float(np.mean(batches)), float(np.std(batches, ddof=1) / len(batches) ** 0.5)


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("service", [Service.FCFS, Service.CONTINUOUS])
def test_md1(utilisation: float, service: Service) -> None:
    """Mean wait u / (2 (1 - u)) service times (Pollaczek-Khinchine), and its distribution."""
    result = serve(_poisson(utilisation, _REQUESTS, 1), second_per_step(1), service=service)
    waits_s = np.asarray(result.outcomes.ttft_s) - 1.0
    mean_s, error_s = _mean_with_error(waits_s)
    assert abs(mean_s - utilisation / (2 * (1 - utilisation))) < 4 * error_s
    for wait_s in (0.5, 2.0, 5.0):
        expected = float(md1_wait_cdf(np.array([utilisation]), np.array([wait_s]))[0])
        assert (waits_s <= wait_s).mean() == pytest.approx(expected, abs=0.015)
    assert result.gpus[0].busy_fraction == pytest.approx(utilisation, rel=0.02)


def test_mm1() -> None:
    """Geometric answers of 20 steps on average are close to exponential: M/G/1 by Pollaczek-Khinchine, exactly."""
    rng, mean_tokens, rate = random.Random(2), 20.0, 0.7 / 20.0
    now_s, requests = 0.0, []
    for _ in range(_REQUESTS):
        now_s += rng.expovariate(rate)
        requests.append(Request(now_s, 1, 1 + int(np.log(1 - rng.random()) / np.log(1 - 1 / mean_tokens))))
    result = serve(requests, second_per_step(1), service=Service.FCFS)
    outcomes = result.outcomes
    waits_s = np.asarray(outcomes.ttft_s) - 1.0
    mean_s, error_s = _mean_with_error(waits_s)
    second_moment = (2 - 1 / mean_tokens) * mean_tokens**2  # of a geometric variable
    assert abs(mean_s - rate * second_moment / (2 * (1 - 0.7))) < 4 * error_s


def test_batches_serve_what_one_at_a_time_cannot() -> None:
    """At four requests a step and twice the capacity of one at a time, the queue stays short."""
    result = serve(_poisson(0.2, 20_000, 3, output_tokens=10), second_per_step(8))
    assert float(np.asarray(result.outcomes.e2e_s).mean()) < 15
    assert result.gpus[0].busy_fraction < 1


_ASKED = st.lists(
    st.tuples(st.floats(0, 4), st.integers(1, 30), st.integers(1, 12), st.sampled_from(["a", "b"])),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(asked=_ASKED, service=st.sampled_from(Service), batch=st.integers(1, 4), faults=st.booleans())
def test_every_request_ends_exactly_once_and_in_order(
    asked: list[tuple[float, int, int, str]], service: Service, batch: int, faults: bool
) -> None:
    times_s = list(itertools.accumulate(gap_s for gap_s, *_ in asked))
    requests = [Request(t, i, o, name) for t, (_, i, o, name) in zip(times_s, asked, strict=True)]
    actions = deploy_all("a", "b")
    if faults:
        actions += (
            NodeFails(at_s=5.0, node_id="node0"),
            NodeReturns(at_s=9.0, node_id="node0"),
            Remove(at_s=30.0, name="b"),
        )
    steps = linear_steps(limits(batch, 40, 32), step_s=0.3, context_token_s=0.002, prompt_token_s=0.01)
    outcomes = serve(requests, steps, service=service, actions=actions, num_gpus=2).outcomes
    assert len(outcomes) == len(requests)
    answered = ~np.isnan(outcomes.last_token_s)
    assert (answered == outcomes.completed).all()  # an answer or a failure, never both, never neither
    done = outcomes.select(answered)
    assert (done.first_token_s > done.scheduled_s).all()
    assert (done.last_token_s >= done.first_token_s).all()
    if not faults:
        assert (outcomes.completed == (outcomes.asked_input_tokens + outcomes.asked_output_tokens <= 40)).all()


@settings(max_examples=100, deadline=None)
@given(asked=_ASKED, service=st.sampled_from(Service))
def test_littles_law_and_busy_time(asked: list[tuple[float, int, int, str]], service: Service) -> None:
    """The time integral of the requests in the system is the sum of their times in it; work done is work asked."""
    times_s = list(itertools.accumulate(gap_s for gap_s, *_ in asked))
    requests = [Request(t, 1, o) for t, (_, _, o, _) in zip(times_s, asked, strict=True)]
    result = serve(requests, second_per_step(1), service=service)
    outcomes = result.outcomes
    changes = sorted([(t, 1) for t in outcomes.scheduled_s] + [(t, -1) for t in outcomes.last_token_s])
    inside, integral_s = 0, 0.0
    for (now_s, change), (next_s, _) in itertools.pairwise(changes):
        inside += change
        integral_s += inside * (next_s - now_s)
    assert integral_s == pytest.approx(float(np.asarray(outcomes.e2e_s).sum()))
    assert result.gpus[0].busy_fraction * result.end_s == pytest.approx(sum(r.output_tokens for r in requests))
