"""The least time a GPU can take: no recorded whole model is faster, and a profile that says so is not believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.estimates import Source
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.physical_floor import FLOOR_SHARE, PhysicalFloor
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec, known_gpus
from fingerprint.measurements import Profile, TimingPoint
from tests.bench.accuracy import RESULTS, load, truths
from tests.bench.format_configs import FORMATS
from tests.fingerprint.step_timed_machine import StepTimedMachine, take_depth_tied
from tests.golden_words import Golden

PUBLIC = Path(__file__).parent / "recorded/public_models.json"
RECORDED = sorted({file.parent for file in RESULTS.glob("*/*-tp?-pp?.json.xz")})


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
def test_no_whole_model_took_less(folder) -> None:
    for one in load(folder):
        floor = PhysicalFloor(one.profile.spec, one.profile.machine.device)
        config = one.config
        for truth in truths(one):
            assert truth.ttft_s > 1.2 * floor.ttft_s(config, truth.workload)
            assert truth.tpot_s > 1.2 * floor.tpot_s(config, truth.workload)


@given(
    gpu=st.sampled_from(known_gpus()),
    batch=st.integers(1, 256),
    input_tokens=st.integers(1, 4000),
    tp=st.sampled_from([1, 2, 4]),
)
def test_the_roofline_is_above_it(gpu, batch, input_tokens, tp) -> None:
    spec, device = StepTimedMachine().spec, gpu_spec(gpu)
    config, workload = DeploymentConfig(tp=tp), Workload(batch, input_tokens, 33)
    floor, roofline = PhysicalFloor(spec, device), RooflineEstimator(spec, device)
    assert floor.ttft_s(config, workload) < roofline.ttft_s(config, workload)
    assert floor.tpot_s(config, workload) < roofline.tpot_s(config, workload)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("w8a8", "flops_8bit_per_s"), ("fp8-dynamic", "flops_fp8_per_s"), ("gptq", "flops_16bit_per_s")],
)
def test_a_quantized_prefill_is_bound_by_the_type_it_is_multiplied_in(name: str, peak: str) -> None:
    """W8A8 multiplies int8, so it may take half of what 16 bits take; 4-bit weights are turned into 16 bits."""
    config = json.loads(PUBLIC.read_text())["models"]["meta-llama/Llama-3.1-8B"]["config"]
    spec = read_spec({**config, "quantization_config": FORMATS[name].quantization})
    gpu, workload = gpu_spec("h200"), Workload(batch=64, input_tokens=2048, output_tokens=2)
    stored, bits16 = (
        DeploymentConfig(weights=w, engine="vllm") for w in (WeightFormat.STORED, WeightFormat.BITS16)
    )
    here_s = PhysicalFloor(spec, gpu).ttft_s(stored, workload)
    in_16_bits_s = PhysicalFloor(replace(spec, stored=None), gpu).ttft_s(bits16, workload)
    # Attention is multiplied in 16 bits in every format.
    assert in_16_bits_s / here_s == pytest.approx(getattr(gpu, peak) / gpu.flops_16bit_per_s, rel=0.06)


@pytest.mark.parametrize(("tokens", "least"), [(3, 0.45), (8, 0.772), (65, 0.886)])
def test_a_time_per_token_below_it_is_not_allowed(tokens: int, least: float) -> None:
    """Bounds by hand: 0.9 of n - 2 steps, as one of n - 1 may lie before the first token is seen."""
    floor = PhysicalFloor(StepTimedMachine().spec, gpu_spec("h200"))
    config, workload = DeploymentConfig(), Workload(64, 300, tokens)
    ttft_s, tpot_s = floor.ttft_s(config, workload), floor.tpot_s(config, workload)
    assert floor.allows(config, workload, ttft_s=ttft_s, tpot_s=(least + 0.01) * tpot_s)
    assert not floor.allows(config, workload, ttft_s=ttft_s, tpot_s=(least - 0.01) * tpot_s)
    assert not floor.allows(config, workload, ttft_s=0.85 * ttft_s, tpot_s=tpot_s)


def faster(profile: Profile, times: float, at: tuple[int, int] | None = None) -> Profile:
    """Return the profile of a clock that runs slow at one point, or at all."""

    def told(point: TimingPoint) -> TimingPoint:
        if at is not None and (point.batch, point.input_tokens) != at:
            return point
        runs = []
        for run in point.runs:
            steps = tuple(replace(s, forward_s=s.forward_s / times, tail_s=s.tail_s / times) for s in run.steps)
            runs.append(replace(run, e2e_s=run.e2e_s / times, device_s=run.device_s / times, steps=steps))
        return replace(point, runs=tuple(runs))

    return replace(profile, timing=tuple(map(told, profile.timing)))


def estimator(profile: Profile) -> DepthTiedEstimator:
    roofline = RooflineEstimator(profile.spec, profile.machine.device)
    return DepthTiedEstimator(profile, roofline, Calibration())


def test_a_point_below_it_is_left_out_and_named(golden: Golden) -> None:
    honest = take_depth_tied(StepTimedMachine())
    (points,) = estimator(honest).l3.points.values()
    at = max((p.batch, p.input_tokens) for p in points)
    told = estimator(faster(honest, 1000.0, at))
    (left,) = told.l3.points.values()
    assert {(p.batch, p.input_tokens) for p in left} == {(p.batch, p.input_tokens) for p in points} - {at}
    assert f"batch {at[0]} with {at[1]} in" in "\n".join(told.warnings)
    golden("fingerprint", told.warnings)


def test_where_every_point_is_below_it_the_datasheet_answers() -> None:
    honest = take_depth_tied(StepTimedMachine())
    config, workload = DeploymentConfig(engine=honest.engine), Workload(4, 300, 33)
    told = estimator(faster(honest, 1000.0))
    found, roofline = told.estimate(config, workload), told._roofline.estimate(config, workload)
    assert (found.ttft_s, found.tpot_s) == (roofline.ttft_s, roofline.tpot_s)
    assert found.measured_config is None
    assert not found.is_measured
    assert found.memory == estimator(honest).estimate(config, workload).memory
    assert len(told.l3.unusable) == len({(p.batch, p.input_tokens) for p in honest.timing if p.repeat > 1})


def test_a_prediction_below_it_is_the_rooflines() -> None:
    honest = take_depth_tied(StepTimedMachine())
    config, workload = DeploymentConfig(engine=honest.engine), Workload(4, 300, 33)
    found = estimator(honest)
    roofline = RooflineEstimator(honest.spec, honest.machine.device).estimate(config, workload)
    assert found.estimate(config, workload).ttft_s.source is not Source.ROOFLINE
    found._floor.ttft_s = lambda *_: roofline.ttft_s.value * 1e3 / FLOOR_SHARE  # a GPU that can need much more
    found._estimates.clear()
    assert found.estimate(config, workload).ttft_s == roofline.ttft_s
    assert found.estimate(config, workload).tpot_s == roofline.tpot_s
    assert found.estimate(config, workload).measured_config is None
