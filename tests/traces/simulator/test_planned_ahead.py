"""Engines that settle what is in a step when the one before begins, against that said one step at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.test_continuous import _ASKED, _curved, _requests
from tests.traces.simulator.worlds import limits, second_per_step, serve
from traces.request import Request
from traces.simulator.step_model import StepModel

HIDDEN_S = 0.03


@dataclass
class _Sequence:
    row: int
    prompt: int  # tokens
    left: int  # tokens of its answer
    cached: int = 0

    @property
    def decodes(self) -> bool:
        return self.cached >= self.prompt


def ahead(steps: StepModel) -> StepModel:
    steps.plans_ahead, steps.hidden_s = True, HIDDEN_S
    return steps


def one_step_at_a_time(requests: list[Request], steps: StepModel) -> tuple[list[float], list[float]]:
    """Return first and last tokens of a plain simulation.

    A step's sequences are those that were there, and had a slot, as the step before it began; a request that
    arrives at an idle engine begins at once.
    """
    first, last = [0.0] * len(requests), [0.0] * len(requests)
    coming = deque(enumerate(requests))
    running: list[_Sequence] = []
    now_s = 0.0

    def admit() -> None:
        while coming and coming[0][1].arrival_s <= now_s and len(running) < steps.limits.max_batch:
            row, request = coming.popleft()
            running.append(_Sequence(row, request.input_tokens, request.output_tokens))

    while running or coming:
        idle = not running
        if idle:
            now_s = max(now_s, coming[0][1].arrival_s)
            admit()
        decoding = [s for s in running if s.decodes]
        budget, tokens, attention_s = steps.limits.max_batched_tokens - len(decoding), 0, 0.0
        chunks = []
        for s in running:
            size = 0 if s.decodes else min(budget - tokens, s.prompt - s.cached)
            if size:
                tokens += size
                attention_s += steps.attention_s[s.cached + size] - steps.attention_s[s.cached]
                chunks.append((s, size))
        admit()  # to the next one
        contexts = [s.cached + 1 for s in decoding]
        context = steps.context(sum(contexts) / len(contexts), max(contexts)) if contexts else 0.0
        if tokens:
            now_s += steps.mixed_s(tokens, attention_s, len(decoding), context, prepared=not idle)
        else:
            now_s += steps.decode_s(len(decoding), context)
        for s, size in chunks:
            s.cached += size
            if s.decodes:
                first[s.row] = now_s
                s.left -= 1
        for s in decoding:
            s.cached += 1
            s.left -= 1
        for s in [s for s in running if s.decodes and not s.left]:
            last[s.row] = now_s
            running.remove(s)
    return first, last


@settings(max_examples=300, deadline=None)
@given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 40),
    pace=st.sampled_from([0.05, 0.3, 1.0, 4.0]),
)
def test_equals_one_step_at_a_time(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    steps = ahead(_curved(limits(max_batch, 100, max_batch + more_tokens), pace))
    requests = _requests(asked)
    outcomes = serve(requests, steps).outcomes
    first, last = one_step_at_a_time(requests, steps)
    np.testing.assert_allclose(outcomes.first_token_s, first, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(outcomes.last_token_s, last, rtol=1e-9, atol=1e-9)


def test_who_comes_during_a_step_is_in_the_one_after_the_next() -> None:
    """The second request arrives in the second step of 1 s and has its token at the end of the fourth."""
    steps = second_per_step(2)
    asked = [Request(0.0, 5, 9), Request(1.5, 5, 2)]
    assert serve(asked, steps).outcomes.first_token_s.tolist() == [1.0, 3.0]
    steps.plans_ahead = True
    outcomes = serve(asked, steps).outcomes
    assert outcomes.first_token_s.tolist() == [1.0, 4.0]
    assert outcomes.last_token_s.tolist() == [9.0, 5.0]


def test_a_slot_that_a_step_frees_is_taken_in_the_one_after_the_next() -> None:
    """A single slot is never freed with another sequence running: the engine is idle then, and begins at once."""
    asked = [Request(0.0, 5, 3), Request(0.0, 5, 9), Request(0.5, 5, 1)]
    steps = second_per_step(2)
    steps.plans_ahead = True
    assert serve(asked, steps).outcomes.first_token_s.tolist() == [1.0, 1.0, 5.0]
    alone = second_per_step(1)
    alone.plans_ahead = True
    assert serve(asked, alone).outcomes.first_token_s.tolist() == [1.0, 4.0, 13.0]


def test_a_step_behind_another_does_not_pay_the_host_again() -> None:
    """A lone prompt of 10 tokens takes 1.1 s, of which 0.4 are hidden behind a decode step of 0.1 s."""
    steps = linear_steps(limits(2, 100, 50), step_s=0.1, prompt_token_s=0.1)
    steps.plans_ahead, steps.hidden_s = True, 0.4
    asked = [Request(0.0, 10, 9), Request(1.15, 10, 1)]
    outcomes = serve(asked, steps).outcomes
    # Steps end at 1.1, 1.2 and 1.3. The newcomer's: 0.1 and 11 tokens of 0.1, less 0.4.
    assert outcomes.first_token_s.tolist() == pytest.approx([1.1, 2.1])


def test_nothing_changes_for_requests_that_find_the_engine_idle() -> None:
    asked = [Request(0.0, 30, 12)] * 2
    found, was = (serve(asked, s).outcomes for s in (ahead(second_per_step(2)), second_per_step(2)))
    assert found.last_token_s.tolist() == was.last_token_s.tolist()
