"""Step times tabulated from an estimator: equal to it at its points, near it between them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimate, SteadyState
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.planning.estimator_factory import estimator_for
from iserve.simulation.running import launch_limits
from tests.bench.accuracy_measure import Recorded
from tests.bench.kept import read_kept
from tests.fingerprint.step_timed_machine import llama_7b
from tests.golden_words import Golden
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.worlds import limits, serve
from traces.request import Request
from traces.simulator.step_model import Limits, StepModel, plans_ahead, tabulate

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


class _Hides:
    """The roofline, of whose lone prompts the host takes so much."""

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        return SteadyState(hidden_s=0.01)

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        return ROOFLINE.estimate(config, workload)


@pytest.mark.parametrize("step_tokens", [256, 512, 2048, 8192])
@pytest.mark.parametrize("tokens", [64, 500, 1024, 4000])
def test_a_lone_prompt_is_served_in_its_ttft_however_it_is_cut(step_tokens: int, tokens: int) -> None:
    """Later chunks of a prompt follow another step: what the host hides there, the TTFT has hidden too."""
    bounds = Limits(max_batch=4, max_context_tokens=4096, max_batched_tokens=step_tokens)
    config = DeploymentConfig(tp=2, engine="vllm")
    steps = tabulate(_Hides(), config, bounds)
    assert (steps.plans_ahead, steps.hidden_s) == (True, 0.01)
    (served_s,) = serve([Request(0.0, tokens, 1)], steps).outcomes.first_token_s
    assert served_s == pytest.approx(steps.prompt_s(tokens), rel=1e-3)  # a chunk takes a decode step at least
    ttft_s = ROOFLINE.ttft_s(config, Workload(1, tokens, 1))
    assert ttft_s * 0.97 <= served_s
    if step_tokens >= 2048:
        assert served_s <= ttft_s * 1.03
    assert np.diff(steps.attention_s).min() >= 0


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
def test_times_that_cannot_be_are_refused(wrong: float, golden: Golden) -> None:
    with golden.raises("simulator-errors", ConfigError):
        linear_steps(limits(), step_s=wrong)


def test_limits_that_cannot_be_are_refused(golden: Golden) -> None:
    with golden.raises("simulator-errors", ConfigError):
        limits(max_batch=8, max_batched_tokens=7)
    with golden.raises("simulator-errors", ConfigError):
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


RECORDED = Path(__file__).parents[3] / "tests/bench/results/h200/Qwen3-8B-16bit-tp1-pp1.json.xz"
PROFILE = from_json(read_kept(RECORDED), Recorded).profile
VLLM = DeploymentConfig(engine="vllm")
PROFILED = estimator_for(PROFILE)
SMALL = Limits(max_batch=32, max_context_tokens=2560, max_batched_tokens=8192)
FROM_PROFILE = tabulate(PROFILED, VLLM, SMALL)


@given(tokens=st.integers(200, 2560))
def test_a_lone_prompt_takes_a_profiles_ttft(tokens: int) -> None:
    """From where its TTFT grows with the prompt. Tables of prompts below what was measured gave a quarter more."""
    ttft_s = PROFILED.estimate(VLLM, Workload(1, tokens, 1)).ttft_s.value
    assert FROM_PROFILE.prompt_s(tokens) == pytest.approx(ttft_s, rel=0.03)


GRAPHS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))  # as vLLM 0.33's log has them, up to 512 rows


def test_a_step_has_the_rows_of_the_smallest_graph_that_holds_it() -> None:
    padded, plain = traits_of("vllm"), traits_of("torch")
    assert [padded.rows_of_graph(n) for n in range(1, 513)] == [
        min(g for g in GRAPHS if g >= n) for n in range(1, 513)
    ]
    assert padded.rows_of_graph(513) == 513  # no graph holds it
    assert [plain.rows_of_graph(n) for n in (1, 9, 300)] == [1, 9, 300]


@pytest.mark.parametrize("most", [32, 12])
def test_a_padded_step_takes_no_more_than_a_full_one_and_no_less_than_without_contexts(most: int) -> None:
    padded = tabulate(PROFILED, VLLM, replace(SMALL, max_batch=most, pads_steps=True))
    for sequences in range(1, most + 1):
        rows = min(g for g in GRAPHS if g >= sequences)
        for context in (1, 300, 2000):
            full_s, found_s = FROM_PROFILE.decode_s(rows, context), padded.decode_s(sequences, context)
            grown_s = full_s - FROM_PROFILE.decode_s(rows, 1)
            assert found_s == pytest.approx(full_s - (1 - sequences / rows) * grown_s, rel=1e-9)


def test_neither_pipelines_nor_drafts_are_padded() -> None:
    """Rows of their steps were not measured."""
    for config in (replace(VLLM, pp=2), replace(VLLM, draft_tokens=3)):
        plain = tabulate(_Wholly(), config, SMALL)
        padded = tabulate(_Wholly(), config, replace(SMALL, pads_steps=True))
        assert [padded.decode_s(n, 500) for n in range(1, 33)] == [plain.decode_s(n, 500) for n in range(1, 33)]


class _Wholly:
    """The profile's estimate of one GPU without drafts, whatever is asked."""

    name = "wholly"

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        return PROFILED.estimate(VLLM, workload)


def test_steps_of_mixtures_are_padded_on_vllm_alone() -> None:
    dense, mixture = PROFILE.spec, replace(PROFILE.spec, num_experts=128, experts_per_token=8)
    work = Workload(8, 128, 64)
    padded = {
        (engine, spec.num_experts): launch_limits(work, engine, spec=spec).pads_steps
        for engine in ("vllm", "torch")
        for spec in (dense, mixture)
    }
    assert [asked for asked, is_padded in padded.items() if is_padded] == [("vllm", 128)]


_STEP = {
    "steps": st.sampled_from([STEPS, FROM_PROFILE]),
    "tokens": st.integers(1, 2560),
    "sequences": st.integers(1, 32),
    "context": st.integers(1, 2560),
    "prepared": st.booleans(),
}


@settings(max_examples=300)
@given(**_STEP)
def test_a_mixed_step_takes_as_long_as_its_longer_part_and_no_longer_than_both(
    steps: StepModel, tokens: int, sequences: int, context: int, prepared: bool
) -> None:
    attention_s = steps.attention_s[tokens]
    mixed_s = steps.mixed_s(tokens, attention_s, sequences, context, prepared=prepared)
    prompts_s = steps.mixed_s(tokens, attention_s, 0, 0.0, prepared=prepared)
    decode_s = steps.decode_s(sequences, context)
    assert max(prompts_s, decode_s) <= mixed_s <= (prompts_s + decode_s) * (1 + 1e-12)


@settings(max_examples=300)
@given(more=st.integers(1, 2560), **_STEP)
def test_a_step_with_more_tokens_takes_no_less(
    steps: StepModel, tokens: int, sequences: int, context: int, prepared: bool, more: int
) -> None:
    def of(x: int, n: int) -> float:
        return steps.mixed_s(x, steps.attention_s[min(x, 2560)], n, context, prepared=prepared)

    for n in (0, sequences):
        assert of(tokens, n) <= of(tokens + more, n)


@settings(max_examples=100)
@given(**_STEP)
def test_a_step_behind_another_saves_the_hidden_time_at_most(
    steps: StepModel, tokens: int, sequences: int, context: int, prepared: bool
) -> None:
    for n in (0, sequences):
        idle_s, behind_s = (
            steps.mixed_s(tokens, steps.attention_s[tokens], n, context, prepared=p) for p in (False, True)
        )
        assert idle_s - steps.hidden_s - 1e-12 <= behind_s <= idle_s


def test_the_hidden_time_is_the_profiles() -> None:
    """A lone step's host time there, by eye 4 to 5 ms, less 0.4 for logits and sampling."""
    assert FROM_PROFILE.hidden_s == PROFILED.steady_state(VLLM).hidden_s == pytest.approx(4e-3, rel=0.1)
    assert FROM_PROFILE.plans_ahead
    assert not plans_ahead(DeploymentConfig(engine="vllm", pp=2))
    assert not STEPS.plans_ahead
    assert STEPS.hidden_s == 0.0
    checked = CorrectedEstimator(PROFILED, [])
    assert tabulate(checked, VLLM, SMALL).hidden_s == FROM_PROFILE.hidden_s
    assert CorrectedEstimator(ROOFLINE, []).steady_state(CONFIG) == SteadyState()


@pytest.mark.parametrize("wrong", [-1e-3, math.nan, math.inf])
def test_a_hidden_time_that_cannot_be_is_refused(wrong: float, golden: Golden) -> None:
    with golden.raises("simulator-errors", ConfigError):
        StepModel(
            limits(max_batch=1),
            contexts=np.array([1.0, 2.0]),
            decode_s=np.ones((1, 2)),
            tokens_s=np.ones(513),
            attention_s=np.zeros(4097),
            steady_state=SteadyState(hidden_s=wrong),
        )
