"""Service models: equal to their estimator where it answers, and laws of capacity."""

from __future__ import annotations

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
from fingerprint.service_model import STEP_KNOTS, ServiceModel, service_model

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
