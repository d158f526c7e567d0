"""Decode steps that verify n-gram drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Correction, Estimate, Source, SteadyState
from fingerprint.estimators.ngram_drafts import WithNgramDrafts, tokens_per_step
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from tests.fingerprint.step_timed_machine import llama_7b
from tests.golden_words import Golden

LLAMA = llama_7b()
PLAIN = RooflineEstimator(LLAMA, gpu_spec("h200-sxm"))
ONE = DeploymentConfig(engine="vllm")
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}


def drafting(acceptance: float) -> WithNgramDrafts:
    return WithNgramDrafts(PLAIN, acceptance, vocab_size=LLAMA.vocab_size)


@pytest.mark.parametrize(("drafts", "acceptance"), [(0, 0.7), (1, 0.5), (4, 0.7), (8, 0.3), (8, 0.95)])
def test_tokens_of_a_step_are_those_up_to_the_first_refused(drafts: int, acceptance: float) -> None:
    """Play 40,000 steps."""
    rng, tokens = random.Random(1), 0
    for _ in range(40_000):
        tokens += 1
        for _ in range(drafts):
            if rng.random() >= acceptance:
                break
            tokens += 1
    assert tokens / 40_000 == pytest.approx(tokens_per_step(drafts, acceptance), rel=0.02)


@given(
    drafts=st.integers(1, 16),
    acceptance=st.floats(0.01, 0.99),
    more=st.floats(0, 0.5),
    batch=st.sampled_from([1, 3, 32, 256]),
    input_tokens=st.integers(1, 4000),
)
def test_a_step_that_verifies_is_between_one_token_and_as_many_sequences(
    drafts: int, acceptance: float, more: float, batch: int, input_tokens: int
) -> None:
    work, config = Workload(batch, input_tokens, 50), replace(ONE, draft_tokens=drafts)
    plain, found = PLAIN.estimate(ONE, work), drafting(acceptance).estimate(config, work)
    step_s = found.tpot_s.value * tokens_per_step(drafts, acceptance)
    assert step_s >= plain.tpot_s.value * (1 - 1e-9)
    as_sequences = PLAIN.estimate(ONE, replace(work, batch=batch * (drafts + 1)))
    # Their KV is read once, not for each token. Where reading and computing overlap, their sum is a little more.
    assert step_s <= 1.1 * as_sequences.tpot_s.value
    assert found.tpot_s.high / found.tpot_s.value == pytest.approx(plain.tpot_s.high / plain.tpot_s.value)
    assert found.config == config
    assert found.ttft_s == plain.ttft_s
    assert replace(found.memory, activation_bytes=plain.memory.activation_bytes) == plain.memory
    logits = found.memory.activation_bytes - plain.memory.activation_bytes
    assert logits == batch * drafts * LLAMA.vocab_size * 6
    further = drafting(min(0.99, acceptance + more)).estimate(config, work)
    assert further.tpot_s.value <= found.tpot_s.value * (1 + 1e-9)


@given(acceptance=st.floats(0.01, 0.99), batch=st.sampled_from([1, 64]))
def test_without_drafts_nothing_changes(acceptance: float, batch: int) -> None:
    work = Workload(batch, 500, 50)
    assert drafting(acceptance).estimate(ONE, work) == PLAIN.estimate(ONE, work)


def test_drafts_win_alone_and_lose_in_a_full_batch() -> None:
    """A step of one sequence reads weights, one of 256 computes already."""
    config, both = replace(ONE, draft_tokens=8), drafting(0.5)
    gains = {
        batch: both.estimate(ONE, work).tpot_s.value / both.estimate(config, work).tpot_s.value
        for batch in (1, 256)
        for work in [Workload(batch, 200, 50)]
    }
    assert gains[1] > 1.8, "of 2.0 tokens a step"
    assert gains[256] < 0.8


def test_a_mixture_reads_more_experts_to_verify() -> None:
    mixture = read_spec(MIXTRAL)
    of_mixture = WithNgramDrafts(
        RooflineEstimator(mixture, gpu_spec("h200-sxm")), 0.7, vocab_size=mixture.vocab_size
    )
    work, config = Workload(1, 200, 50), replace(ONE, draft_tokens=4)

    def gain(one: WithNgramDrafts) -> float:
        return one.estimate(ONE, work).tpot_s.value / one.estimate(config, work).tpot_s.value

    assert gain(of_mixture) < 0.6 * gain(drafting(0.7))


class Measured:
    """Estimator of an engine that hides host time, whose steps are measured for up to 8 sequences."""

    name = "measured"

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        if workload.batch > 8:
            raise NotMeasuredError("no more than 8 sequences were run")
        assert not config.draft_tokens, "it knows no drafts"
        found = PLAIN.estimate(config, workload)
        tpot = replace(found.tpot_s, source=Source.MEASURED)
        correction = Correction(
            measured_at="2026-11-27",
            config=config,
            workload=workload,
            exact=True,
            ttft_log_ratio=0.0,
            tpot_log_ratio=0.0,
            memory_bytes=0,
        )
        return replace(found, tpot_s=tpot, measured_config=config, correction=correction)

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        assert not config.draft_tokens
        return SteadyState(hidden_s=0.25)


def test_a_step_with_drafts_was_not_measured() -> None:
    of_measured = WithNgramDrafts(Measured(), 0.7, vocab_size=LLAMA.vocab_size)
    config = replace(ONE, draft_tokens=2)
    found = of_measured.estimate(config, Workload(2, 200, 50))
    assert found.tpot_s.source is Source.EXTRAPOLATED
    assert not found.is_measured
    assert of_measured.estimate(ONE, Workload(2, 200, 50)).is_measured
    assert of_measured.steady_state(config).hidden_s == 0.25
    with pytest.raises(NotMeasuredError, match="8 sequences"):
        of_measured.estimate(config, Workload(4, 200, 50))


@pytest.mark.parametrize("drafts", [-1, 17])
def test_numbers_of_drafts_that_cannot_be(drafts: int, golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        DeploymentConfig(draft_tokens=drafts)
