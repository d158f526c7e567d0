"""Requests of the usual length and the longest one: what room they ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from tests.fingerprint.test_roofline import LLAMA_2_7B
from tests.golden_words import Golden

sizes = st.integers(1, 500)


@given(sizes, sizes, sizes, st.integers(0, 2000), st.sampled_from(["torch", "vllm", "tensorrt-llm"]))
def test_room_for_the_usual_and_for_one_of_the_longest(
    batch: int, prompt: int, answer: int, longer: int, engine: str
) -> None:
    usual = Workload(batch, prompt, answer)
    both = Workload(batch, prompt, answer, prompt + answer + longer)
    assert both.context_tokens == prompt + answer + longer
    room = both.kv_tokens(engine)
    assert room >= max(both.context_tokens, usual.kv_tokens(engine))
    if traits_of(engine).has_slots:
        assert room == batch * both.context_tokens
    else:  # pages: the longest costs no more than itself
        assert room <= usual.kv_tokens(engine) + both.context_tokens
    assert Workload(batch, prompt, answer, prompt + answer).kv_tokens(engine) == usual.kv_tokens(engine)


def test_the_longest_moves_memory_and_no_time() -> None:
    estimator, config = RooflineEstimator(LLAMA_2_7B, gpu_spec("h200-sxm")), DeploymentConfig(engine="vllm")
    usual, both = (
        estimator.estimate(config, Workload(8, 100, 50, longest)) for longest in (0, LLAMA_2_7B.max_context_tokens)
    )
    assert (both.ttft_s, both.tpot_s) == (usual.ttft_s, usual.tpot_s)
    assert both.memory.layer_kv_bytes > usual.memory.layer_kv_bytes
    assert both.memory.activation_bytes > usual.memory.activation_bytes  # its prompt is a step
    slots = DeploymentConfig(engine="torch")
    most = estimator.estimate(slots, Workload(8, 100, 50, LLAMA_2_7B.max_context_tokens)).memory.layer_kv_bytes
    assert most > both.memory.layer_kv_bytes


@pytest.mark.parametrize(
    "longest",
    [
        149,
        -1,
        100_000_001,
    ],
    ids=repr,
)
def test_a_longest_request_that_cannot_be(longest: int, golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        Workload(8, 100, 50, longest)
