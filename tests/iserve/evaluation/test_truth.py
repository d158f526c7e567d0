"""Truth of a world: its factors change the times that they name and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.roofline import RooflineEstimator, all_reduce_s
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from iserve.evaluation.arena import make_arena
from iserve.evaluation.truth import true_estimator, true_links
from iserve.evaluation.world import Interconnect, Truth
from tests.iserve.evaluation.worlds import LLAMA_8B, small_world
from traces.simulator.contention import ProcessorSharing, StageDemand

SPEC, H200 = read_spec(LLAMA_8B), gpu_spec("h200-sxm")
WORK = Workload(8, 500, 100)


def times(truth: Truth, **config: int) -> tuple[float, float]:
    estimate = true_estimator(SPEC, H200, (), truth).estimate(DeploymentConfig(engine="vllm", **config), WORK)
    return estimate.ttft_s.value, estimate.tpot_s.value


def test_one_gpu_has_no_all_reduce_to_slow_down() -> None:
    assert times(Truth(all_reduce=7)) == times(Truth())


def test_slow_all_reduce_adds_its_own_time() -> None:
    """Two all-reduces in each of 32 layers, of 8 tokens in a decode step."""
    added = times(Truth(all_reduce=7), tp=2)[1] - times(Truth(), tp=2)[1]
    assert added == pytest.approx(6 * 2 * 32 * all_reduce_s(H200, 4096, 2, 8), rel=1e-9)


def test_step_times_scale_every_time() -> None:
    scaled, plain = times(Truth(step_times=1.5), tp=2), times(Truth(), tp=2)
    assert scaled == pytest.approx([1.5 * value for value in plain], rel=1e-12)


@pytest.mark.parametrize(("engines", "speed"), [(1, 1.0), (2, 1 / 2.2), (3, 1 / 3.3)])
def test_busy_engines_on_a_gpu_cost_each_a_tenth_more_than_their_number(engines: int, speed: float) -> None:
    """Measured on an H200: 2.16 to 2.24 times with two busy engines, 3.28 to 3.34 with three."""
    assert ProcessorSharing(overhead=1.1)([StageDemand(1.0, [engines - 1.0])]) == pytest.approx(speed)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("tp", [2, 4])
def test_measured_links_are_those_of_the_truth(factor: float, tp: int) -> None:
    truth = Truth(all_reduce=factor)
    linked = replace(H200, interconnect=true_links(H200, 4, truth))
    config = DeploymentConfig(engine="vllm", tp=tp)
    found = RooflineEstimator(SPEC, linked).estimate(config, WORK)
    assert (found.ttft_s.value, found.tpot_s.value) == pytest.approx(times(truth, tp=tp), rel=1e-9)
    assert linked.measured_links(8) is None


def test_ours_knows_the_links_unless_they_are_unmeasured() -> None:
    config = DeploymentConfig(engine="vllm", tp=2)
    for interconnect in Interconnect:
        arena = make_arena(small_world(interconnect=interconnect, truth={"all_reduce": 4}), 1, Path())
        own, believed = arena.ours["chat"].estimate(config, WORK), arena.models["chat"].estimator
        knows = interconnect is Interconnect.MEASURED
        assert own.links_measured is knows
        assert (own.tpot_s.value > believed.estimate(config, WORK).tpot_s.value) is knows
