"""Admission by prompts and preemption, by hand and against the rule said one step at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.preempting_reference import StepByStep
from tests.traces.simulator.test_continuous import _ASKED, _curved, _requests
from tests.traces.simulator.worlds import OnTheFirst, cluster, deploy_all, limits, serve
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.kv_use import KvUse
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import NodeFails, Policies, Scenario
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits


def preempting(kv_tokens: int, max_batch: int = 4, step_tokens: int = 512, window: int | None = None) -> Limits:
    bounds = limits(max_batch, 100, step_tokens)
    return replace(bounds, kv_tokens=kv_tokens, kv_window=window, preempts=True)


def use(result: SimulationResult) -> KvUse:
    (figures,) = result.deployments
    assert figures.kv is not None
    return figures.kv


def test_the_latest_of_two_that_do_not_fit_to_the_end_is_preempted() -> None:
    """Steps of 1 s. Two prompts of 10 tokens in a room of 26: both are admitted, 6 tokens are left.

    The first step makes a token of each. Steps two to four take two tokens of KV each; the fifth does not fit, so
    the second sequence, with 13 tokens of KV and 4 of its answer, is preempted. The first goes on alone until 8 s.
    The second is computed again, 14 tokens, in the ninth step, which makes its fifth token, and ends at 12 s.
    """
    result = serve([Request(0.0, 10, 8), Request(0.0, 10, 8)], linear_steps(preempting(26), step_s=1.0))
    assert result.outcomes.first_token_s.tolist() == [1.0, 1.0]
    assert result.outcomes.last_token_s.tolist() == [8.0, 12.0]
    assert (use(result).preemptions, use(result).recomputed_tokens) == (1, 13)
    assert use(result).peak_fraction == 1.0  # 13 and 13


def test_the_use_of_kv_over_time() -> None:
    """A lone request of 10 and 5 tokens in a room of 100: 10 in the first second, 11 to 14 in the next four."""
    result = serve([Request(0.0, 10, 5)], linear_steps(preempting(100), step_s=1.0))
    kv = use(result)
    assert (kv.peak_fraction, kv.preemptions) == (0.14, 0)
    assert kv.mean_fraction == pytest.approx((10 + 11 + 12 + 13 + 14) / 5 / 100)


def test_computing_again_takes_prompt_and_answer_in_chunks() -> None:
    """The same two requests with steps of 8 tokens, and 0.1 s more for each token of a step of prompts.

    Prompts take steps of 8, 8 and 4 tokens; the first request decodes in the third, which is of 5 tokens: 1.8, 1.8
    and 1.5 s, so first tokens are at 3.6 s and 5.1 s. Of 26 tokens of KV 21 are taken then; 23 at 6.1 s, 25 at
    7.1 s. The next step does not fit: the second (12 of KV, 3 made) is preempted. The first has 4 tokens then, and
    ends at 11.1 s. 13 are computed again, in 1.8 and 1.5 s, which makes the fourth token; four more follow.
    """
    steps = linear_steps(preempting(26, step_tokens=8), step_s=1.0, prompt_token_s=0.1)
    result = serve([Request(0.0, 10, 8), Request(0.0, 10, 8)], steps)
    assert result.outcomes.first_token_s.tolist() == pytest.approx([3.6, 5.1])
    assert result.outcomes.last_token_s.tolist() == pytest.approx([11.1, 11.1 + 1.8 + 1.5 + 4.0])
    assert use(result).recomputed_tokens == 12


def test_a_preempted_sequence_goes_before_requests_that_wait() -> None:
    """The third request would fit as soon as the second is preempted, and waits behind it."""
    asked = [Request(0.0, 10, 8), Request(0.0, 10, 8), Request(4.5, 2, 1)]
    result = serve(asked, linear_steps(preempting(26), step_s=1.0))
    assert result.outcomes.last_token_s.tolist() == [8.0, 12.0, 9.0]  # admitted together, in the ninth step


def test_a_request_is_admitted_when_its_prompt_fits() -> None:
    """15 and 5 tokens twice in a room of 30: the whole answers would not fit at once, prompts do."""
    asked = [Request(0.0, 15, 5), Request(0.0, 15, 5)]
    reserving = replace(preempting(30), preempts=False)
    whole, prompt = (serve(asked, linear_steps(each, step_s=1.0)) for each in (reserving, preempting(30)))
    assert whole.outcomes.first_token_s.tolist() == [1.0, 6.0]
    assert prompt.outcomes.first_token_s.tolist() == [1.0, 1.0]


def test_a_request_larger_than_all_kv_is_refused() -> None:
    result = serve([Request(0.0, 20, 7), Request(0.0, 20, 6)], linear_steps(preempting(26), step_s=1.0))
    assert result.outcomes.failure.tolist() == [Failure.BAD_REQUEST, Failure.NONE]


_LOADS = st.lists(_ASKED, min_size=1, max_size=25)


@settings(max_examples=300, deadline=None)
@given(
    asked=_LOADS,
    max_batch=st.integers(1, 6),
    plans_ahead=st.booleans(),
    kv_tokens=st.none() | st.integers(600, 1000),
    pace=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_without_pressure_on_kv_nothing_changes(
    asked: list[tuple[float, int, int]], max_batch: int, plans_ahead: bool, kv_tokens: int | None, pace: float
) -> None:
    """Six of the longest requests are 600 tokens."""
    bounds = replace(limits(max_batch, 100, max_batch + 20), kv_tokens=kv_tokens)
    reserving, prompts = (_curved(each, pace) for each in (bounds, replace(bounds, preempts=True)))
    reserving.plans_ahead = prompts.plans_ahead = plans_ahead
    before, now = (serve(_requests(asked), each).outcomes for each in (reserving, prompts))
    np.testing.assert_allclose(now.first_token_s, before.first_token_s, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(now.last_token_s, before.last_token_s, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    asked=_LOADS,
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 40),
    kv_tokens=st.integers(100, 250),
    plans_ahead=st.booleans(),
    pace=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_equals_the_rule_one_step_at_a_time(
    asked: list[tuple[float, int, int]],
    max_batch: int,
    more_tokens: int,
    kv_tokens: int,
    plans_ahead: bool,
    pace: float,
) -> None:
    """Every request ends, and the KV never exceeds its room: the peak is the rule's."""
    steps = _curved(preempting(kv_tokens, max_batch, max_batch + more_tokens), pace)
    steps.plans_ahead = plans_ahead
    requests = _requests(asked)
    result, true = serve(requests, steps), StepByStep(requests, steps)
    np.testing.assert_allclose(result.outcomes.first_token_s, true.first, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(result.outcomes.last_token_s, true.last, rtol=1e-9, atol=1e-9)
    kv = use(result)
    assert (kv.preemptions, kv.recomputed_tokens) == (true.preemptions, true.recomputed)
    assert kv.peak_fraction == pytest.approx(true.peak / kv_tokens)
    assert kv.mean_fraction <= kv.peak_fraction + 1e-9
    assert true.peak <= kv_tokens


@settings(max_examples=200, deadline=None)
@given(asked=_LOADS, kv_tokens=st.integers(40, 120), window=st.integers(1, 60), plans_ahead=st.booleans())
def test_windows_bound_what_is_kept_of_a_sequence(
    asked: list[tuple[float, int, int]], kv_tokens: int, window: int, plans_ahead: bool
) -> None:
    """The KV never exceeds its room, and every request that is taken ends."""
    steps = _curved(preempting(kv_tokens, 5, 25, window), 0.3)
    steps.plans_ahead = plans_ahead
    result = serve(_requests(asked), steps)
    assert use(result).peak_fraction <= 1.0
    refused = result.outcomes.failure == Failure.BAD_REQUEST
    assert (result.outcomes.completed | refused).all()
    lengths = result.outcomes.asked_input_tokens + result.outcomes.asked_output_tokens
    assert refused.tolist() == (lengths > steps.limits.longest).tolist()


def test_a_preempted_request_is_lost_with_its_node() -> None:
    """The second has had tokens; the third has not begun, and has no replica any more."""
    asked = [Request(0.0, 10, 8), Request(0.0, 10, 8), Request(4.5, 20, 1)]
    scenario = Scenario(cluster=cluster(1), actions=(*deploy_all(""), NodeFails(at_s=6.5, node_id="node0")))
    deployer = OnTheFirst(linear_steps(preempting(26), step_s=1.0))
    outcomes = simulate(asked, scenario, Policies(deployer=deployer)).outcomes
    assert outcomes.failure.tolist() == [Failure.CONNECTION_LOST, Failure.CONNECTION_LOST, Failure.NOT_SERVED]
