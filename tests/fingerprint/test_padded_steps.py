"""Decode steps of batches that were not measured: a mixture's has the rows of its graph, as vLLM computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Quantity
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import Profile
from iserve.planning.estimator_factory import estimator_for
from tests.bench.accuracy import RESULTS
from tests.bench.accuracy_measure import Recorded
from tests.bench.kept import read_kept
from tests.bench.served_steps import ServedStep, ServedSteps
from traces.simulator.step_model import Limits, tabulate

VLLM = DeploymentConfig(engine="vllm")
NAME = "Qwen3-30B-A3B-16bit-tp1-pp1.json.xz"
MIXTURE, LARGER_GRAPHS = (
    from_json(read_kept(RESULTS / folder / NAME), Recorded).profile
    for folder in ("graphs-512-h200-vllm-0.33", "families-h200-vllm-0.33")
)
DENSE = from_json(read_kept(RESULTS / "h200-vllm-0.33/Llama-3.1-8B-16bit-tp1-pp1.json.xz"), Recorded).profile
SERVED = RESULTS / "served_steps_h200"
PADDED = [
    pytest.param(profile, step, most, id=f"graphs to {profile.graph_tokens}, batch {step.batch}")
    for profile, name, most in (
        (MIXTURE, "Qwen3-30B-A3B.json", 0.04),
        (LARGER_GRAPHS, "Qwen3-30B-A3B-graphs-4096.json", 0.05),
    )
    for step in from_json((SERVED / name).read_bytes(), ServedSteps).steps
    if step.part == "padded"
]


def step_of(profile: Profile, batch: int, input_tokens: int = 512) -> Quantity:
    return estimator_for(profile).estimate(VLLM, Workload(batch, input_tokens, 49)).tpot_s


@pytest.mark.parametrize(("profile", "step", "most"), PADDED)
def test_a_step_of_a_server_with_sequences_that_no_profile_ran_is_predicted(
    profile: Profile, step: ServedStep, most: float
) -> None:
    """Measured in another process; 8 to 20% short before."""
    found, measured_s = step_of(profile, step.batch, step.tokens), sum(step.seconds) / len(step.seconds)
    assert found.value == pytest.approx(measured_s, rel=most)
    assert found.low <= measured_s <= found.high


@pytest.mark.parametrize(("profile", "step", "most"), PADDED)
def test_a_simulated_step_is_as_near(profile: Profile, step: ServedStep, most: float) -> None:
    limits = Limits(max_batch=64, max_context_tokens=4096, max_batched_tokens=8192, pads_steps=True)
    steps, context = tabulate(estimator_for(profile), VLLM, limits), step.tokens + 30
    measured_s = sum(step.seconds) / len(step.seconds)
    assert steps.decode_s(step.batch, context) == pytest.approx(measured_s, rel=most)
    rows = int(step.case.rpartition(" ")[2])
    assert steps.decode_s(step.batch, context) <= 1.002 * steps.decode_s(rows, context)  # noise of the growth


@pytest.mark.parametrize("pp", [2, 4])
def test_pipelines_are_not_padded(pp: int) -> None:
    """Scaled from one GPU: from its batch as it was measured, not from the rows of a graph."""
    estimator = estimator_for(MIXTURE)
    assert isinstance(estimator, DepthTiedEstimator)
    asked, work = replace(VLLM, pp=pp), Workload(9, 512, 49)
    by_peaks = RooflineEstimator(MIXTURE.spec, MIXTURE.machine.device)
    ratio = by_peaks.estimate(asked, work).tpot_s.value / by_peaks.estimate(VLLM, work).tpot_s.value
    plain_s = estimator.l3.latency(VLLM, work).tpot_s.value
    assert estimator.estimate(asked, work).tpot_s.value == pytest.approx(ratio * plain_s, rel=0.02)


@pytest.mark.parametrize(("batch", "rows"), [(3, 4), (9, 16), (17, 24), (20, 24), (120, 120), (121, 128)])
def test_fewer_sequences_take_less_by_no_more_than_the_kv_that_is_not_read(batch: int, rows: int) -> None:
    found, whole = step_of(MIXTURE, batch, 2048), step_of(MIXTURE, rows, 2048)
    kv_bytes = (rows - batch) * (2048 + 49) * MIXTURE.spec.num_layers * 2 * 2 * 4 * 128
    most_s = kv_bytes / MIXTURE.machine.device.memory_bytes_per_s
    assert whole.value - most_s * 1.01 <= found.value <= whole.value
    assert found.low <= found.value <= found.high
    assert found.source is whole.source


def with_batch(profile: Profile, batch: int, instead: int) -> Profile:
    """Return the profile as if ``batch`` had been measured ``instead`` of one that was."""
    timing = (replace(p, batch=batch if p.batch == instead else p.batch) for p in profile.timing)
    return replace(profile, timing=tuple(timing))


@pytest.mark.parametrize(
    ("profile", "batches"),
    [
        (MIXTURE, (1, 8, 32, 128)),
        (with_batch(MIXTURE, 30, instead=32), (30,)),
        (MIXTURE, (129, 200)),  # more than was measured
        (DENSE, (1, 3, 8, 9, 17, 120)),
    ],
    ids=["measured", "measured next to a graph", "more", "dense"],
)
def test_what_is_not_padded_is_as_the_points_have_it(profile: Profile, batches: tuple[int, ...]) -> None:
    estimator = estimator_for(profile)
    assert isinstance(estimator, DepthTiedEstimator)
    for batch in batches:
        work = Workload(batch, 512, 49)
        assert estimator.estimate(VLLM, work).tpot_s == estimator.l3.latency(VLLM, work).tpot_s
