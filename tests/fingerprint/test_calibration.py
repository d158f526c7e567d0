"""Intervals from what predictions of other models were off by."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.estimators.calibration import Calibration, MeasuredError, kernels_of, shipped_calibration
from fingerprint.estimators.l3 import L3
from fingerprint.estimators.repeat_overhead import repeat_overheads
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.model_spec import ModelSpec, Stored
from tests.bench.accuracy import RESULTS, load
from tests.fingerprint.step_timed_machine import StepTimedMachine, llama_7b, take_depth_tied
from tests.fingerprint.synthetic_machine import llama


def error(shape: str, log_error: float, metric: str = "ttft") -> MeasuredError:
    return MeasuredError(
        model=shape,
        shape_hash=shape,
        engine="vllm 0.24.0",
        gpu="h200",
        weights="16bit",
        tp=1,
        pp=1,
        metric=metric,
        batch=1,
        input_tokens=128,
        log_error=log_error,
    )


def of(*models: list[float], metric: str = "ttft") -> Calibration:
    return Calibration(tuple(error(f"m{i}", e, metric) for i, errors in enumerate(models) for e in errors))


def bounds(calibration: Calibration, metric: str = "ttft", **asked: object) -> tuple[float, float, float]:
    """Low, middle and high as asked on the machine of :func:`error`."""
    where = {"prompt_tokens": 128, "exclude_shape": "", "engine": "vllm 0.24.1", "gpu": "h200", "weights": "16bit"}
    found = calibration.of_others(metric, **(where | asked))
    assert found.low <= found.middle <= found.high
    return found.low, found.middle, found.high


several = st.lists(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=30), min_size=2, max_size=8)


@given(models=several)
def test_nine_in_ten_of_the_others_errors_lie_within_each_model_counting_alike(models) -> None:
    low, middle, high = bounds(of(*models), exclude_shape="another")

    def share(least: float, most: float) -> float:
        inside = [sum(least - 1e-12 <= e <= most + 1e-12 for e in errors) / len(errors) for errors in models]
        return sum(inside) / len(inside)

    assert share(low, high) >= 0.9 - 1e-9
    assert share(-10, middle) >= 0.5 - 1e-9
    assert share(middle, 10) >= 0.5 - 1e-9


@given(models=several, own=st.lists(st.floats(-5, 5), max_size=5))
def test_the_own_model_is_left_out(models, own) -> None:
    others = of(*models)
    with_own = Calibration(others.errors + tuple(error("own", e) for e in own))
    assert bounds(with_own, exclude_shape="own") == bounds(others, exclude_shape="own")


@given(models=several, factor=st.floats(1, 5))
def test_errors_that_are_larger_by_a_factor_make_all_of_it_larger_by_it(models, factor) -> None:
    scaled = of(*([e * factor for e in errors] for errors in models))
    assert bounds(scaled) == pytest.approx(tuple(factor * e for e in bounds(of(*models))))


@given(models=several, more=st.floats(0, 1))
def test_a_model_that_was_further_off_moves_nothing_the_other_way(models, more) -> None:
    """The models are as many; one of them is predicted lower than before."""
    before = bounds(of(*models))
    after = bounds(of([e + more for e in models[0]], *models[1:]))
    assert all(later >= earlier for later, earlier in zip(after, before, strict=True))


@given(models=several)
def test_the_order_in_which_they_were_measured_changes_nothing(models) -> None:
    calibration = of(*models)
    turned = Calibration(calibration.errors[::-1])
    assert bounds(turned) == pytest.approx(bounds(calibration))


def test_one_model_of_many_points_does_not_outweigh_the_others() -> None:
    """A hundred points that are exact, and nine models of one point each that are 10% off."""
    assert bounds(of([0.0] * 100, *[[0.1]] * 9)) == (0.0, 0.1, 0.1)


@pytest.mark.parametrize("models", [(), ([0.3],)])
def test_fewer_than_two_other_models_are_an_assumption(models) -> None:
    assert bounds(of(*models), exclude_shape="own") == (-0.15, 0.0, 0.15)


def test_each_metric_has_its_own() -> None:
    both = Calibration(of([0.2], [0.2]).errors + of([-0.1], [-0.1], metric="tpot").errors)
    assert bounds(both) == (0.2, 0.2, 0.2)
    assert bounds(both, "tpot") == (-0.1, -0.1, -0.1)


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"gpu": "l40s"},
        {"engine": "vllm 0.23.0"},
        {"engine": "vllm 0.24.0rc1"},
        {"engine": "vllm 0.24.1.dev5+g1a2b3c4"},
        {"engine": "tensorrt-llm 1.2.0"},
        {"weights": "fp8"},
        {"tp": 2},
        {"pp": 2},
        {"graph_tokens": 4096},
    ],
)
def test_another_gpu_release_format_degree_or_graph_is_not_moved_by_what_is_typical_of_this_one(elsewhere) -> None:
    assert bounds(of([0.1, 0.2], [0.1]), **elsewhere) == (0.0, 0.0, 0.2)
    assert bounds(of([-0.1, 0.2], [-0.1]), **elsewhere) == (-0.1, 0.0, 0.2)


def test_one_model_here_and_others_elsewhere_are_taken_together_and_move_nothing() -> None:
    there = tuple(replace(e, gpu="l40s") for e in of([0.3], [0.2]).errors)
    mixed = Calibration((error("here", 0.1), *there))
    assert bounds(mixed)[1] == 0.0


def test_points_of_about_as_many_prompt_tokens_count_most() -> None:
    """Short prompts off by 40%, long ones by 2%, of three models each."""
    near = of(*[[0.4, 0.0, -0.4]] * 3).errors
    far = tuple(replace(e, input_tokens=32_768, log_error=e.log_error / 20) for e in near)
    both = Calibration(near + far)
    for prompt_tokens, off in ((64, 0.4), (128, 0.4), (16_384, 0.02), (131_072, 0.02)):
        assert bounds(both, prompt_tokens=prompt_tokens) == pytest.approx((-off, 0.0, off))


def test_one_more_prompt_token_does_not_change_an_interval_at_once() -> None:
    near = of(*[[0.4, 0.1, -0.4]] * 3).errors
    far = tuple(replace(e, input_tokens=32_768, log_error=e.log_error / 20) for e in near)
    both = Calibration(near + far)
    tokens = [round(2 ** (k / 200)) for k in range(7 * 200, 15 * 200)]
    found = [bounds(both, prompt_tokens=n) for n in tokens]
    assert max(high for _, _, high in found) == pytest.approx(0.4)
    assert min(high for _, _, high in found) == pytest.approx(0.02)
    for (low, _, high), (next_low, _, next_high) in pairwise(found):
        assert abs(next_low - low) < 0.04
        assert abs(next_high - high) < 0.04


def test_beyond_all_that_was_measured_the_nearest_decides() -> None:
    assert bounds(of([0.1, -0.1], [0.2, -0.2]), prompt_tokens=10**9) == (-0.2, -0.1, 0.2)


def test_a_token_costs_beside_layers_what_embedding_and_norms_move() -> None:
    """Decode steps take that cost from prompts: it is at most ten vectors a token through memory, as recorded."""
    for one in load(RESULTS / "h200"):
        spec, device = one.profile.spec, one.profile.machine.device
        vector_s = 2 * spec.hidden_size / device.memory_bytes_per_s
        first, step = repeat_overheads(one.profile.timing, spec.num_layers)
        assert first.per_token_s == step.per_token_s
        assert first.per_token_s < 10 * vector_s


def test_errors_that_are_shipped_are_read_as_they_are_written() -> None:
    errors = of([0.01, -0.02], [0.03]).errors
    assert from_json(to_json(errors), tuple[MeasuredError, ...]) == errors
    for shipped in shipped_calibration().errors:
        assert shipped.metric in ("ttft", "tpot")
        is_worst = (shipped.engine, shipped.model, shipped.metric) == ("vllm 0.26.0", "Qwen3-30B-A3B", "tpot")
        assert abs(shipped.log_error) < (math.log(3) if is_worst else 1)  # its 190% too long at 8 x 128
        assert replace(shipped) == shipped


def quantized(method: str, form: str) -> ModelSpec:
    held = Stored(method=method, form=form, bits=8, layer_linear_bytes=1e6, layer_expert_bytes=0.0)
    return replace(llama(), stored=held)


def test_what_a_checkpoint_holds_is_told_apart_from_what_is_made_while_loading() -> None:
    """Five ways of storing share one name; an error of one is none of another."""
    specs = (quantized("fp8", "float, a scale per matrix"), quantized("gptq", "4-bit, groups of 128"))
    experts = replace(llama(), num_experts=8, experts_per_token=2)
    names = [kernels_of(spec, WeightFormat.STORED) for spec in specs]
    names += [kernels_of(llama(), weights) for weights in WeightFormat]
    names += [kernels_of(experts, weights) for weights in WeightFormat]
    assert len(set(names)) == len(names)
    assert kernels_of(llama(), WeightFormat.FP8) == "fp8"  # as errors are kept
    calibration = Calibration(tuple(replace(error(f"m{i}", 0.1), weights=names[0]) for i in range(3)))
    assert bounds(calibration, weights=names[0]) == (0.1, 0.1, 0.1)
    assert bounds(calibration, weights=names[1]) == (0.0, 0.0, 0.1)


def test_l3_asks_for_the_errors_of_what_the_checkpoint_holds() -> None:
    spec = replace(llama_7b(), stored=quantized("fp8", "float, a scale per matrix").stored)
    machine = StepTimedMachine(spec=spec)
    profile = take_depth_tied(machine, weights=(WeightFormat.STORED,))
    engine, gpu = dict(profile.machine.versions)["engine"], profile.machine.device.name

    def ttft_s(weights: str) -> float:
        errors = tuple(replace(error(f"m{i}", 0.1), engine=engine, gpu=gpu, weights=weights) for i in range(3))
        l3 = L3(profile, RooflineEstimator(spec, profile.machine.device), Calibration(errors))
        config = DeploymentConfig(engine="vllm", weights=WeightFormat.STORED)
        return l3.latency(config, Workload(8, 128, 33)).ttft_s.value

    moved = ttft_s(kernels_of(spec, WeightFormat.STORED)) / ttft_s("fp8")
    assert moved == pytest.approx(math.exp(0.1))


def test_at_degrees_that_nobody_measured_the_same_format_speaks_before_all_others() -> None:
    """Else a few models of other kernels would widen what every other has elsewhere."""
    own = tuple(replace(error(f"m{i}", 0.02 * i), tp=1) for i in range(3))
    others = tuple(replace(error(f"x{i}", 0.4), weights="16bit experts") for i in range(3))
    low, middle, high = bounds(Calibration((*own, *others)), tp=4)
    assert (low, middle) == (0.0, 0.0)
    assert high < 0.1
    low, middle, high = bounds(Calibration((*own, *others)), tp=4, weights="fp8")  # none kept: dense ones speak
    assert (low, middle) == (0.0, 0.0)
    assert high < 0.1
    low, middle, high = bounds(Calibration((*own, *others)), tp=4, weights="fp8 experts")
    assert (low, middle) == (0.0, 0.0)
    assert high > 0.3


def test_at_degrees_that_nobody_measured_errors_with_such_graphs_speak_before_those_with_smaller_ones() -> None:
    """A step that no graph holds goes at the host's pace."""
    small = tuple(error(f"x{i}", 0.4) for i in range(3))
    large = tuple(replace(error(f"m{i}", 0.02 * i), graph_tokens=4096) for i in range(3))
    both = Calibration((*small, *large))
    assert bounds(both, tp=4, graph_tokens=4096)[2] < 0.1
    assert bounds(both, tp=4)[2] > 0.3
    assert bounds(Calibration((*small, *large[:1])), tp=4, graph_tokens=4096)[2] > 0.3  # of one model alone
