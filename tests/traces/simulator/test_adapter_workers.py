"""Times of workers with adapter slots: by hand, against one step at a time, and against the base."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.variant_routing import make_variant_policy
from tests.traces.simulator.adapter_reference import StepByStep
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.test_continuous import _ASKED, _curved, _requests
from tests.traces.simulator.variant_worlds import serve_variants, variants_of
from tests.traces.simulator.worlds import limits, second_per_step, serve
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.step_model import StepModel

ALL_AT_ONCE = 10**6  # requests are sent to the worker as they arrive


def costs(slots: int = 8, load_s: float = 0.4, prompt_share: float = 0.5) -> AdapterCost:
    return AdapterCost(
        slots=slots,
        max_loaded=4 * slots,
        load_s=load_s,
        added_s=lambda rows, active: 0.01 + 0.003 * rows + 0.02 * active + 0.001 * rows * active,
        prompt_share=prompt_share,
    )


def asked_of(asked: list[tuple[float, int, int]], variants: list[str]) -> list[Request]:
    return [replace(request, model=name) for request, name in zip(_requests(asked), variants, strict=False)]


def test_a_load_stops_all_decoding() -> None:
    """The base's request has tokens at 1 and 2 s, is stopped for 10 s, and has the rest from 13 s on."""
    steps, cost = second_per_step(4), AdapterCost(slots=2, max_loaded=2, load_s=10.0)
    requests = [Request(0.0, 5, 4), Request(1.5, 5, 2, model="a"), Request(1.6, 5, 2, model="a")]
    outcomes = serve_variants(requests, steps, cost).outcomes
    assert outcomes.first_token_s.tolist() == [1.0, 13.0, 13.0]
    assert outcomes.last_token_s.tolist() == [14.0, 14.0, 14.0]


def test_loads_follow_one_another_and_requests_of_the_base_go_on_between() -> None:
    """Loads until 2 and 4 s: the first adapter's request waits for the second's load."""
    steps, cost = second_per_step(4), AdapterCost(slots=2, max_loaded=2, load_s=2.0)
    requests = [Request(0.0, 5, 1, model="a"), Request(0.5, 5, 1, model="b"), Request(1.0, 5, 1)]
    result = serve_variants(requests, steps, cost)
    assert result.outcomes.last_token_s.tolist() == [5.0, 5.0, 5.0]
    found = variants_of(result)
    assert (found.loads, found.hits, found.evictions, found.asked_for, found.requests) == (2, 0, 0, 2, 2)


def test_steps_take_longer_by_the_adapters_that_are_in_them() -> None:
    """Two adapters decode together for two steps, then one does, then the base alone."""
    steps = second_per_step(4)
    cost = AdapterCost(slots=2, max_loaded=2, added_s=lambda rows, active: 10.0 * rows + 100.0 * active)
    requests = [Request(0.0, 5, 3, model="a"), Request(0.0, 5, 5, model="b"), Request(0.0, 5, 6)]
    outcomes = serve_variants(requests, steps, cost).outcomes
    assert outcomes.first_token_s.tolist() == [1.0] * 3
    assert outcomes.last_token_s.tolist() == [1 + 2 * 231.0, 463 + 2 * 121.0, 705 + 1.0]


def test_a_prompt_takes_its_share_more() -> None:
    """The prompt of the adapter alone takes longer, not that of the base next to it."""
    steps = linear_steps(limits(4, 100, 50), step_s=1.0, prompt_token_s=0.1)
    cost = AdapterCost(slots=2, max_loaded=2, prompt_share=0.5)
    requests = [Request(0.0, 10, 1, model="a"), Request(0.0, 20, 1)]
    assert serve_variants(requests, steps, cost).outcomes.last_token_s.tolist() == [4.0 + 0.5 * 2.0] * 2


def test_prompts_of_a_delta_are_merged_once_a_step() -> None:
    """Three prompts of two deltas in the first step, where nothing decodes; then two deltas decode."""
    steps = second_per_step(4)
    cost = AdapterCost(
        slots=2,
        max_loaded=2,
        added_s=lambda rows, active: 10.0 * rows + 100.0 * active,
        prompt_s=lambda tokens: 1000.0 + tokens,
    )
    requests = [Request(0.0, 5, 2, model="a"), Request(0.0, 6, 2, model="a"), Request(0.0, 7, 2, model="b")]
    outcomes = serve_variants(requests, steps, cost).outcomes
    assert outcomes.first_token_s.tolist() == [1 + 1011.0 + 1007.0] * 3
    assert outcomes.last_token_s.tolist() == [1 + 2018.0 + 1 + 30.0 + 200.0] * 3


def test_a_delta_that_only_prompts_is_none_of_the_decoding_ones() -> None:
    """ "b" arrives while "a" decodes: its prompt is merged, and the kernel has one delta in that step."""
    steps = second_per_step(4)
    cost = AdapterCost(
        slots=2, max_loaded=2, added_s=lambda rows, active: 100.0 * active, prompt_s=lambda tokens: 1000.0
    )
    requests = [Request(0.0, 5, 3, model="a"), Request(1002.0, 5, 1, model="b")]
    outcomes = serve_variants(requests, steps, cost).outcomes
    assert outcomes.first_token_s.tolist() == [1001.0, 1001.0 + 101.0 + 1 + 100.0 + 1000.0]


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    variants=st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=25, max_size=25),
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 40),
    pace=st.sampled_from([0.05, 1.0, 4.0]),
    plans_ahead=st.booleans(),
    preempts=st.booleans(),
)
def test_equals_one_step_at_a_time(
    asked: list[tuple[float, int, int]],
    variants: list[str],
    max_batch: int,
    more_tokens: int,
    pace: float,
    plans_ahead: bool,
    preempts: bool,
) -> None:
    bounds = limits(max_batch, 100, max_batch + more_tokens)
    if preempts:
        bounds = replace(bounds, kv_tokens=10**6, preempts=True)
    steps = _curved(bounds, pace)
    steps.plans_ahead, steps.hidden_s = plans_ahead, 0.03 * plans_ahead
    requests = asked_of(asked, variants)
    outcomes = serve_variants(requests, steps, costs(), outstanding_per_slot=ALL_AT_ONCE).outcomes
    true = StepByStep(requests, steps, costs())
    np.testing.assert_allclose(outcomes.first_token_s, true.first, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(outcomes.last_token_s, true.last, rtol=1e-9, atol=1e-9)


class WithOneAdapter(StepModel):
    """Steps of ``of``, each with the cost of one adapter."""

    __slots__ = ("cost", "of")

    def __init__(self, of: StepModel, cost: AdapterCost) -> None:
        self.of, self.cost, self.limits = of, cost, of.limits
        self.plans_ahead, self.hidden_s = of.plans_ahead, of.hidden_s
        self.longest_share = of.longest_share
        self.tokens_s, self.attention_s = of.tokens_s, of.attention_s

    def decode_s(self, sequences: int, mean_context: float) -> float:
        return self.of.decode_s(sequences, mean_context) + self.cost.added_s(sequences, 1)

    def run_s(self, sequences: int, mean_context: float, steps: int) -> float:
        return sum(self.decode_s(sequences, mean_context + step) for step in range(steps))

    def step_at(self, sequences: int, mean_context: float, elapsed_s: float) -> tuple[int, float]:
        steps, took_s = 1, self.decode_s(sequences, mean_context)
        while took_s < elapsed_s:
            took_s += self.decode_s(sequences, mean_context + steps)
            steps += 1
        return steps, took_s

    def mixed_s(
        self, tokens: int, attention_s: float, sequences: int, mean_context: float, *, prepared: bool = False
    ) -> float:
        plain_s = self.of.mixed_s(tokens, attention_s, sequences, mean_context, prepared=prepared)
        added_s = self.cost.added_s(sequences, 1) if sequences else 0.0
        return plain_s + added_s + self.cost.prompt_share * (self.tokens_s[tokens] + attention_s)


@settings(max_examples=100, deadline=None)
@given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 40),
    policy=st.sampled_from(["least-loaded", "busiest-loaded"]),
)
def test_one_variant_is_the_base_with_the_cost_of_one_adapter(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, policy: str
) -> None:
    """All requests for one variant that is loaded, and all for a base whose steps are longer."""
    steps = _curved(limits(max_batch, 100, max_batch + more_tokens), 1.0)
    arrivals = [(round(gap_s, 6), *tokens) for gap_s, *tokens in asked]  # none within a load
    requests, cost = _requests(arrivals), costs(load_s=1e-12)
    of_one = [replace(request, model="a") for request in requests]
    found = serve_variants(of_one, steps, cost, policy=make_variant_policy(policy)).outcomes
    base = serve(requests, WithOneAdapter(steps, cost)).outcomes
    np.testing.assert_allclose(found.first_token_s, base.first_token_s, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(found.last_token_s, base.last_token_s, rtol=1e-7, atol=1e-7)


@settings(max_examples=100, deadline=None)
@given(asked=st.lists(_ASKED, min_size=1, max_size=25), max_batch=st.integers(1, 6))
def test_slots_that_are_not_used_change_nothing(asked: list[tuple[float, int, int]], max_batch: int) -> None:
    steps, requests = _curved(limits(max_batch, 100, max_batch + 20), 1.0), _requests(asked)
    found, base = serve_variants(requests, steps, costs()), serve(requests, steps)
    assert found.outcomes.last_token_s.tolist() == base.outcomes.last_token_s.tolist()
    assert variants_of(found).waiting is None


@pytest.mark.parametrize(
    "fields", [{"slots": 0}, {"max_loaded": 1}, {"load_s": -1.0}, {"load_s": float("inf")}, {"prompt_share": -0.1}]
)
def test_impossible_costs(fields) -> None:
    with pytest.raises(ConfigError):
        AdapterCost(**({"slots": 2, "max_loaded": 8} | fields))
