"""Prompts that are in part in the engine's prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Source, SteadyState
from fingerprint.estimators.prefix_hits import WithPrefixHits
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from tests.fingerprint.step_timed_machine import llama_7b

WHOLE = RooflineEstimator(llama_7b(), gpu_spec("h200-sxm"))
LLAMA = DeploymentConfig(engine="vllm")


@given(
    hits=st.floats(0, 0.999),
    more=st.floats(0, 0.5),
    input_tokens=st.integers(1, 4000),
    batch=st.sampled_from([1, 8]),
)
def test_more_hits_never_take_longer_and_what_is_left_never_less_than_by_itself(
    hits: float, more: float, input_tokens: int, batch: int
) -> None:
    work = Workload(batch, input_tokens, 50)
    whole, found = WHOLE.estimate(LLAMA, work), WithPrefixHits(WHOLE, hits).estimate(LLAMA, work)
    assert found == replace(whole, ttft_s=found.ttft_s), "all else is as it was"
    assert found.ttft_s.value <= whole.ttft_s.value
    assert found.ttft_s.high / found.ttft_s.value == pytest.approx(whole.ttft_s.high / whole.ttft_s.value)
    left = replace(work, input_tokens=max(1, round(input_tokens * (1 - hits))))
    assert found.ttft_s.value >= 0.98 * min(WHOLE.estimate(LLAMA, left).ttft_s.value, whole.ttft_s.value)
    further = WithPrefixHits(WHOLE, min(0.999, hits + more)).estimate(LLAMA, work)
    assert further.ttft_s.value <= found.ttft_s.value * (1 + 1e-9)


def test_what_is_left_of_a_long_prompt_attends_to_all_of_it() -> None:
    """Half of 32,000 tokens is more than half of the work: it looks back at the first half, too."""
    work = Workload(1, 32_000, 50)
    half = WithPrefixHits(WHOLE, 0.5).estimate(LLAMA, work).ttft_s.value
    assert half > 1.2 * WHOLE.estimate(LLAMA, replace(work, input_tokens=16_000)).ttft_s.value
    assert half > 0.5 * WHOLE.estimate(LLAMA, work).ttft_s.value


class Measured:
    """Estimator of an engine that hides host time, whose answers are measured."""

    name = "measured"

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        found = WHOLE.estimate(config, workload)
        return replace(found, ttft_s=replace(found.ttft_s, source=Source.MEASURED))

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        return SteadyState(hidden_s=0.25)


def test_an_engine_without_a_cache_computes_whole_prompts() -> None:
    work = Workload(1, 2000, 50)
    for engine, cached in (("torch", False), ("vllm", True), ("tensorrt-llm", True), ("", False)):
        config = DeploymentConfig(engine=engine)
        found, whole = WithPrefixHits(WHOLE, 0.5).estimate(config, work), WHOLE.estimate(config, work)
        assert (found.ttft_s.value < whole.ttft_s.value) == cached, engine


def test_what_is_worked_out_is_not_called_measured_and_hidden_time_stays() -> None:
    found = WithPrefixHits(Measured(), 0.5)
    assert found.estimate(LLAMA, Workload(1, 2000, 50)).ttft_s.source is Source.EXTRAPOLATED
    assert found.estimate(LLAMA, Workload(1, 1, 50)).ttft_s.source is Source.MEASURED
    assert found.steady_state(LLAMA).hidden_s == 0.25
    assert WithPrefixHits(WHOLE, 0.5).steady_state(LLAMA) == SteadyState()
