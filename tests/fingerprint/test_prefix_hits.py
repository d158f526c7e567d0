"""Prompts that are in part in the engine's prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
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


@pytest.mark.parametrize("hits", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(hits: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        WithPrefixHits(WHOLE, hits)
