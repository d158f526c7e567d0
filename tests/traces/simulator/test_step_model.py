"""Step times tabulated from an estimator: equal to it at its points, near it between them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.controller.estimating import estimator_for
from tests.bench.accuracy_measure import Recorded
from tests.bench.kept import read_kept
from tests.fingerprint.step_timed_machine import llama_7b
from tests.traces.simulator.worlds import limits
from traces.simulator.step_model import Limits, StepModel, linear_steps, tabulate

CONFIG = DeploymentConfig(tp=2)
ROOFLINE = RooflineEstimator(llama_7b(), gpu_spec("a6000"))
BOUNDS = Limits(max_batch=48, max_context_tokens=4096, max_batched_tokens=8192)
STEPS = tabulate(ROOFLINE, CONFIG, BOUNDS)


@pytest.mark.parametrize("batch", [1, 2, 16, 32, 48])
@pytest.mark.parametrize("context", [2, 64, 512, 4096])
def test_decode_is_the_estimators_at_the_knots(batch: int, context: int) -> None:
    tpot_s = ROOFLINE.tpot_s(CONFIG, Workload(batch, context - 1, 2))
    assert STEPS.decode_s(batch, context) == pytest.approx(tpot_s, rel=1e-12)


@given(batch=st.integers(1, 48), context=st.integers(2, 4096))
def test_decode_is_near_the_estimators_everywhere(batch: int, context: int) -> None:
    tpot_s = ROOFLINE.tpot_s(CONFIG, Workload(batch, context - 1, 2))
    assert STEPS.decode_s(batch, context) == pytest.approx(tpot_s, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 64, 80, 125, 4096])
def test_a_lone_prompt_takes_the_estimators_ttft(tokens: int) -> None:
    assert STEPS.prompt_s(tokens) == pytest.approx(ROOFLINE.ttft_s(CONFIG, Workload(1, tokens, 1)), rel=1e-9)


@given(tokens=st.integers(1, 4096))
def test_a_lone_prompt_is_near_the_estimators_everywhere(tokens: int) -> None:
    assert STEPS.prompt_s(tokens) == pytest.approx(ROOFLINE.ttft_s(CONFIG, Workload(1, tokens, 1)), rel=0.03)


@given(batch=st.integers(1, 32), tokens=st.integers(1, 256))
def test_a_batch_of_prompts_is_near_the_estimators(batch: int, tokens: int) -> None:
    together_s = STEPS.mixed_s(batch * tokens, batch * STEPS.attention_s[tokens], 0, 0.0)
    assert together_s == pytest.approx(ROOFLINE.ttft_s(CONFIG, Workload(batch, tokens, 1)), rel=0.06)


@pytest.mark.parametrize("tokens", [64, 512, 2048])
@pytest.mark.parametrize("sequences", [1, 16, 48])
@pytest.mark.parametrize("context", [128, 1024, 4000])
def test_a_mixed_step_overlaps_no_more_than_the_roofline_and_no_less_than_two_steps(
    tokens: int, sequences: int, context: int
) -> None:
    """The roofline knows steps of both kinds at once, though no estimator's interface asks for them: there all of
    the KV's reading hides behind the prompt's arithmetic. In kernels that follow one another it does not."""
    own_s = ROOFLINE._step_s(
        CONFIG,
        tokens=tokens + sequences,
        sequences=sequences + 1,
        kv_tokens=tokens + sequences * context,
        attended_pairs=tokens * (tokens + 1) / 2 + sequences * context,
    )
    mixed_s = STEPS.mixed_s(tokens, STEPS.attention_s[tokens], sequences, context)
    apart_s = STEPS.prompt_s(tokens) + STEPS.decode_s(sequences, context)
    assert own_s * 0.93 <= mixed_s <= apart_s  # what the host does for each decoder is not seen (7%)


@settings(max_examples=300)
@given(n=st.integers(1, 48), context=st.floats(1, 4000), steps=st.integers(1, 600), share=st.floats(0.0, 1.0))
def test_a_run_is_the_sum_of_its_steps_and_is_cut_between_them(
    n: int, context: float, steps: int, share: float
) -> None:
    ends_s = np.cumsum(
        [STEPS.decode_s(n, context + i) for i in range(steps + 1)]
    )  # one more than asked: share 1 may round
    assert STEPS.run_s(n, context, steps) == pytest.approx(ends_s[-2], rel=1e-10)
    elapsed_s = share * ends_s[-2]
    begun = STEPS.steps_until(n, context, elapsed_s)
    assert ends_s[begun - 1] >= elapsed_s * (1 - 1e-10)
    assert begun == 1 or ends_s[begun - 2] < elapsed_s * (1 + 1e-10)


def test_smaller_chunks_take_no_less_than_the_estimator_says() -> None:
    chunked = tabulate(ROOFLINE, CONFIG, Limits(max_batch=8, max_context_tokens=4096, max_batched_tokens=512))
    ttft_s = ROOFLINE.ttft_s(CONFIG, Workload(1, 4096, 1))
    assert ttft_s * (1 - 1e-9) <= chunked.prompt_s(4096) < 1.5 * ttft_s


def test_one_at_a_time_needs_no_attention_table() -> None:
    alone = tabulate(ROOFLINE, CONFIG, Limits(max_batch=1, max_context_tokens=4096, max_batched_tokens=8192))
    assert max(alone.attention_s) == pytest.approx(0.0, abs=1e-4)
    for tokens, answer in ((512, 128), (2048, 64)):
        estimate = ROOFLINE.estimate(CONFIG, Workload(1, tokens, answer))
        e2e_s = alone.prompt_s(tokens) + alone.run_s(1, tokens + 1, answer - 1)
        assert e2e_s == pytest.approx(estimate.e2e_s.value, rel=0.02)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="not a positive, finite number"):
        linear_steps(limits(), step_s=wrong)


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="no room for one token of each of 8"):
        limits(max_batch=8, max_batched_tokens=7)
    with pytest.raises(ConfigError, match="max_batch must be at least 1, got 0"):
        limits(max_batch=0)


def test_tables_of_other_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="are needed, got"):
        StepModel(
            limits(max_batch=2),
            contexts=np.array([1.0, 2.0]),
            decode_s=np.ones((1, 2)),
            tokens_s=np.ones(513),
            attention_s=np.zeros(4097),
        )


def test_decode_steps_are_those_of_long_answers_where_an_estimator_tells_them_apart() -> None:
    """A profile recorded on an H200: the step after the prompts is shorter than one in a row of steps."""
    record = Path("tests/bench/results/h200/Llama-3.1-8B-16bit-tp1-pp1.json.xz")
    profile = from_json(read_kept(Path(__file__).parents[3] / record), Recorded).profile
    estimator, config = estimator_for(profile), DeploymentConfig(engine=profile.engine)
    steps = tabulate(
        estimator, config, Limits(max_batch=64, max_context_tokens=4096, max_batched_tokens=8192, kv_tokens=None)
    )
    first, long = (estimator.estimate(config, Workload(64, 2048 - o // 2, o)).tpot_s.value for o in (2, 65))
    assert steps.decode_s(64, 2048) == pytest.approx(long, rel=0.05)
    assert first < 0.8 * long, "else this record shows nothing"
