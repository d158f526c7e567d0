"""Service models: equal to their estimator where it answers, and laws of capacity."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.service_model import STEP_KNOTS, ServiceModel, service_between, service_model

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
WORK = Workload(batch=1, input_tokens=1024, output_tokens=200)


def estimator() -> RooflineEstimator:
    return RooflineEstimator(read_spec(LLAMA_8B), gpu_spec("h200"))


def model(tp: int = 1) -> ServiceModel:
    return service_model(estimator(), DeploymentConfig(tp=tp, engine="vllm"), WORK)


def test_an_idle_replica_of_a_dense_model_is_one_request_alone() -> None:
    """To the bit: what is planned of dense models does not depend on the mixtures' part."""
    for tp in (1, 2, 8):
        assert model(tp).idle_s == model(tp).alone_s
    pipeline = service_model(estimator(), DeploymentConfig(pp=4, engine="vllm"), WORK)
    assert pipeline.idle_s == pipeline.alone_s


def test_an_idle_replica_of_a_mixture_reads_nearly_all_experts_in_each_step() -> None:
    """Steps of 1 to 16 sequences read ever more experts, of 4 to 10 ms; each sequence has 0.1 ms of its own."""
    read = [1 - 0.75 ** (knot - 1) for knot in STEP_KNOTS]
    steps_s = tuple(4e-3 + 6e-3 * part + 1e-4 * knot for part, knot in zip(read, STEP_KNOTS, strict=True))
    mixture = replace(model(), step_s=steps_s, experts_read_by=16.0)
    assert mixture.idle_s == pytest.approx(mixture.prompt_s + 199 * 10e-3, rel=0.02)
    assert mixture.alone_s == replace(mixture, experts_read_by=1.0).alone_s < mixture.idle_s


@given(st.floats(1, 300), st.integers(0, 30_000))
def test_what_is_the_sequences_own_is_no_part_of_an_idle_replica(read_by: float, tokens: int) -> None:
    """Nearly all of a step with long contexts is; a dense model has nothing else that grows."""
    long = service_model(estimator(), DeploymentConfig(engine="vllm"), replace(WORK, input_tokens=1024 + tokens))
    mixture = replace(long, experts_read_by=read_by)
    assert long.alone_s <= mixture.idle_s <= 1.2 * long.alone_s


class KnownTo:
    """Roofline that answers for batches up to a size, as a profile does."""

    name = "known"

    def __init__(self, most: int) -> None:
        self._most, self._inner = most, estimator()

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        if workload.batch > self._most:
            raise NotMeasuredError(f"nothing is known beyond a batch of {self._most}")
        return self._inner.estimate(config, workload)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_request_alone_takes_the_estimators_time(tp: int) -> None:
    alone = estimator().estimate(DeploymentConfig(tp=tp, engine="vllm"), WORK)
    assert model(tp).alone_s == pytest.approx(alone.e2e_s.value)


@pytest.mark.parametrize("batch", STEP_KNOTS)
def test_steps_are_the_estimators_at_every_knot(batch: int) -> None:
    found = estimator().estimate(DeploymentConfig(engine="vllm"), replace(WORK, batch=batch))
    assert model().step_of(batch) == pytest.approx(found.tpot_s.value)


@pytest.mark.parametrize(("engine", "in_flight"), [("vllm", 4), ("torch", 1)])
def test_stages_that_are_filled_each_have_a_part_of_the_sequences(engine: str, in_flight: int) -> None:
    config = DeploymentConfig(pp=4, engine=engine)
    found = service_model(estimator(), config, WORK)
    part = estimator().estimate(config, replace(WORK, batch=64 // in_flight))
    alone = estimator().estimate(config, WORK)
    assert found.step_of(64) == pytest.approx(part.tpot_s.value)
    assert found.alone_s == pytest.approx(alone.e2e_s.value)
    assert found.busy_share_per_gpu == in_flight / 4


def test_kv_of_a_token_is_that_of_all_layers() -> None:
    """2 (K, V) x 32 layers x 8 heads x 128 x 2 bytes, at the upper end of the memory's interval (2 to 4%)."""
    assert 1.0 <= model().kv_bytes_per_token / 131_072 <= 1.05


def test_beyond_what_is_known_steps_go_on_in_a_line() -> None:
    known = service_model(KnownTo(16), DeploymentConfig(engine="vllm"), WORK)
    whole = model()
    assert known.step_s[:5] == whole.step_s[:5]
    slope = (known.step_s[4] - known.step_s[3]) / 8
    assert known.step_s[-1] == pytest.approx(known.step_s[4] + slope * 240)


def test_a_configuration_of_which_nothing_is_known_has_no_model() -> None:
    with pytest.raises(NotMeasuredError):
        service_model(KnownTo(0), DeploymentConfig(engine="vllm"), WORK)


@given(st.floats(1, 256), st.floats(1, 256))
def test_a_larger_batch_serves_no_less(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert model().requests_per_s(more) >= model().requests_per_s(less) * (1 - 1e-9)


def test_the_knee_reaches_97_percent_of_the_most() -> None:
    found = model()
    assert found.requests_per_s(found.knee_batch) == pytest.approx(0.97 * found.requests_per_s(256), rel=1e-3)


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="positive times"):
        replace(model(), prompt_s=0.0)


BATCH = Workload(batch=4, input_tokens=100, output_tokens=10)


def between(workload: Workload = BATCH, **times: tuple[float, float]) -> ServiceModel:
    given = {"ttft_s": (1.0, 2.5), "tpot_s": (0.1, 0.16)} | times
    return service_between(DeploymentConfig(), workload, **given)


def test_a_service_model_between_two_estimates_has_the_times_of_both_and_of_the_line_through_them() -> None:
    service = between()
    assert service.prompts_s(100) == pytest.approx(1.0)
    assert service.prompts_s(400) == pytest.approx(2.5)
    assert [service.step_of(n) for n in (1, 2, 3, 4, 7, 301)] == pytest.approx([0.1, 0.12, 0.14, 0.16, 0.22, 6.1])
    assert service.loaded_step_of(1) == pytest.approx(0.1)
    assert service.loaded_step_of(4) == pytest.approx(0.16 + 3 * 0.5 / 10)


def test_a_further_prompt_of_a_batch_takes_no_longer_than_one_alone_and_no_negative_time() -> None:
    assert between(ttft_s=(1.0, 9.0)).added_prompt_s == 1.0
    assert between(ttft_s=(1.0, 0.5)).added_prompt_s == 0.0
    assert between(replace(BATCH, batch=1), ttft_s=(1.0, 1.0)).added_prompt_s == pytest.approx(0.9)


@pytest.mark.parametrize("batch", [1, 8, 32, 256])
def test_two_estimates_tell_as_much_of_a_pipeline_as_of_one_gpu(batch: int) -> None:
    """The line through them takes up to 10% of the capacity, with and without stages."""
    work = replace(WORK, batch=256)

    def ratio(config: DeploymentConfig) -> float:
        alone, full = (estimator().estimate(config, replace(work, batch=size)) for size in (1, 256))
        times = ((alone.ttft_s.value, full.ttft_s.value), (alone.tpot_s.value, full.tpot_s.value))
        of_two, of_all = service_between(config, work, *times), service_model(estimator(), config, work)
        return of_two.requests_per_s(batch) / of_all.requests_per_s(batch)

    one, piped = (ratio(DeploymentConfig(pp=pp, engine="vllm")) for pp in (1, 4))
    assert piped == pytest.approx(one, rel=0.02)


def test_prompts_of_a_filled_pipeline_run_at_once() -> None:
    whole = model()
    piped = service_model(estimator(), DeploymentConfig(pp=4, engine="vllm"), WORK)
    assert piped.added_prompt_s == pytest.approx(whole.added_prompt_s / 4, rel=0.01)
    assert piped.prompt_s == pytest.approx(whole.prompt_s, rel=0.01)
    assert piped.request_s(2) >= whole.prompt_s + whole.added_prompt_s * (1 - 1e-9)  # none overtakes it


def test_slowed_has_every_time_so_many_times_as_long() -> None:
    slow = between().slowed(3.0, 2.0)
    assert slow.prompts_s(250) == pytest.approx(3 * between().prompts_s(250))
    assert slow.step_of(5) == pytest.approx(2 * between().step_of(5))
    assert model().slowed(3.0, 1.0).added_prompt_s == pytest.approx(3 * model().added_prompt_s)


@pytest.mark.parametrize(
    "wrong", [{"ttft_s": (0.0, 1.0)}, {"ttft_s": (1.0, math.nan)}, {"tpot_s": (0.1, math.nan)}]
)
def test_times_that_cannot_be(wrong: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(ConfigError):
        between(**wrong)


@pytest.mark.parametrize("further_s", [-0.1, 1.1, math.nan])
def test_a_further_prompt_that_cannot_be(further_s: float) -> None:
    with pytest.raises(ConfigError, match="a further prompt"):
        replace(between(), further_prompt_s=further_s)
