"""Pipelines in fleets: their GPUs, the rule's plan, and the time of a request against the simulator's pipeline."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.service_model import ServiceModel, service_model
from placement.fleet.load import given_rates
from placement.fleet.memory import KvRoom, kv_room
from placement.fleet.performance import forecast
from placement.fleet.search import choose
from placement.fleet.starts import most_replicas, rule_plan
from placement.fleet.types import Fleet, FleetDeployment, FleetGoal, FleetPlan, FleetReplica
from tests.fingerprint.step_timed_machine import llama_7b
from tests.placement.fleet.fleets import GIB, gpus, option
from tests.traces.simulator.test_pipelined import run
from traces.request import Request
from traces.simulator.step_model import Limits, StepModel, tabulate


def pipeline(pp: int, tp: int = 1, **options: float) -> ServiceModel:
    """Return the option of tests with ``pp`` stages, as fast as one."""
    whole = option(tp, **options)  # type: ignore[arg-type]
    return replace(
        whole,
        config=DeploymentConfig(tp=tp, pp=pp, engine="vllm"),
        fixed_bytes=whole.fixed_bytes // pp,
        kv_bytes_per_token=whole.kv_bytes_per_token / pp,
    )


def fleet_of(*options: ServiceModel, count: int) -> Fleet:
    return Fleet((FleetDeployment(name="m", options=options),), gpus(count))


def test_gpus_of_a_pipeline_are_aligned_stages_of_which_the_roomiest_are_first() -> None:
    fleet = fleet_of(pipeline(3, tp=2), count=8)
    assert fleet.blocks[6] == ((0, 1, 2, 3, 4, 5), (2, 3, 4, 5, 6, 7))
    small = tuple(replace(gpu, usable_bytes=GIB) if gpu.gpu_index == 3 else gpu for gpu in fleet.gpus)
    assert replace(fleet, gpus=small).blocks[6][0] == (0, 1, 4, 5, 6, 7)


def test_sizes_that_tp_has_are_aligned_for_pipelines_too() -> None:
    assert fleet_of(option(2), pipeline(2), count=4).blocks[2] == ((0, 1), (2, 3))


@pytest.mark.parametrize("goal", FleetGoal)
def test_tp_is_the_rule_and_kept_where_a_pipeline_is_no_faster(goal: FleetGoal) -> None:
    """Each takes 120 GB, of which a GPU holds 76: two by TP, or as two stages."""
    fleet = fleet_of(option(2, fixed_gib=120), pipeline(2, fixed_gib=120), count=4)
    assert [fleet.option(one).config.pp for one in rule_plan(fleet).replicas] == [1]
    chosen = choose(fleet, goal, [1.0]).chosen.plan
    assert {fleet.option(one).config.pp for one in chosen.replicas} == {1}


@pytest.mark.parametrize(("of_tp_time", "pp"), [(0.92, 1), (0.9, 2)])
def test_a_pipeline_has_to_gain_2_percent_over_as_many_replicas_by_tp(of_tp_time: float, pp: int) -> None:
    """Two replicas gain 5% over the rule's one, by TP or as pipelines; two pipelines 1.3% more, or 3.7%."""
    time = of_tp_time / 1.7  # TP of 2 takes 1 / 1.7 of the time
    staged = pipeline(2, fixed_gib=120, prompt_s=0.1 * time, step_s=0.01 * time, step_slope_s=0.0001 * time)
    fleet = fleet_of(option(2, fixed_gib=120), staged, count=4)
    found = choose(fleet, FleetGoal.LATENCY, [1.0])
    assert not found.is_rule
    assert [(one.gpus, fleet.option(one).config.pp) for one in found.chosen.plan.replicas] == [
        ((0, 1), pp), ((2, 3), pp),
    ]  # fmt: skip


def test_a_pipeline_of_fewer_gpus_is_no_rule_where_tp_fits() -> None:
    fleet = fleet_of(option(4, fixed_gib=200), pipeline(3, fixed_gib=200), count=4)
    assert fleet.least(0).config.tp == 4
    assert [len(one.gpus) for one in rule_plan(fleet).replicas] == [4]


@pytest.mark.parametrize(("count", "replicas"), [(4, 1), (6, 2), (7, 2)])
def test_most_replicas_are_on_gpus_of_their_own(count: int, replicas: int) -> None:
    """Memory would do for more: groups of three overlap, as every GPU begins one."""
    plan = most_replicas(fleet_of(pipeline(3, fixed_gib=60), count=count), 0)
    assert plan is not None
    held = [gpu for one in plan.replicas for gpu in one.gpus]
    assert len(plan.replicas) == replicas
    assert len(set(held)) == len(held)


def test_each_gpu_is_left_to_one_of_the_pipelines_still_expected() -> None:
    """A stage takes a GPU. Of seven GPUs the first three are taken; GPUs 3 to 5 and 4 to 6 overlap."""
    fleet = replace(fleet_of(pipeline(3, fixed_gib=180), count=7), expected=3)
    room = kv_room(fleet, FleetPlan((FleetReplica(0, 0, (0, 1, 2)),)))
    assert room is not None
    assert room.unplaced == 1


def test_a_pipeline_alone_is_the_rule() -> None:
    fleet = fleet_of(pipeline(3, fixed_gib=200), count=4)
    assert fleet.least(0).config.pp == 3
    assert [len(one.gpus) for one in rule_plan(fleet).replicas] == [3]


LIMITS = Limits(max_batch=256, max_context_tokens=32_768, max_batched_tokens=8192, kv_tokens=10**7)


def seven_b(tp: int, pp: int, lengths: tuple[int, int]) -> tuple[ServiceModel, StepModel]:
    """Return Llama-2-7B on vLLM and RTX A6000s for mean lengths, for the forecast and for the simulator."""
    config = DeploymentConfig(tp=tp, pp=pp, engine="vllm")
    estimator = RooflineEstimator(llama_7b(), gpu_spec("a6000"))
    service = service_model(estimator, config, Workload(1, *lengths))
    return replace(service, is_split_measured=True), tabulate(estimator, config, LIMITS)


def simulated_and_forecast_s(
    service: ServiceModel, steps: StepModel, rate_per_s: float
) -> tuple[float, float, float]:
    """Return the mean time of a request as simulated and as forecast, and the forecast's utilisation."""
    rng, at_s, asked = random.Random(1), 0.0, []
    for _ in range(1500):
        at_s += rng.expovariate(rate_per_s)
        lengths = (
            min(8 * mean, 1 + int(rng.expovariate(1 / mean)))
            for mean in (service.input_tokens, service.output_tokens)
        )
        asked.append(Request(at_s, *(int(length) for length in lengths)))
    pp = service.config.pp
    outcomes = run(asked, steps, (32 // pp,) * pp).outcomes
    simulated_s = float(np.mean(outcomes.last_token_s - np.array([one.arrival_s for one in asked])))
    fleet = fleet_of(service, count=service.num_gpus)
    plan = FleetPlan((FleetReplica(0, 0, tuple(range(service.num_gpus))),))
    found = forecast(fleet, plan, given_rates([rate_per_s]), KvRoom((1e7,)))
    return simulated_s, float(found.e2e_s[0, 0]), float(found.utilisation[0, 0])


@pytest.mark.parametrize("rate_per_s", [0.4, 1.5, 3.0])
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 4), (2, 2)])
def test_a_request_takes_as_long_as_on_the_simulators_pipeline(tp: int, pp: int, rate_per_s: float) -> None:
    simulated_s, forecast_s, utilisation = simulated_and_forecast_s(*seven_b(tp, pp, (500, 200)), rate_per_s)
    assert utilisation < 0.65
    assert forecast_s == pytest.approx(simulated_s, rel=0.15)


@pytest.mark.parametrize("load", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("lengths", [(4000, 50), (500, 200), (100, 800)])
def test_a_pipelines_forecast_is_as_near_as_that_of_one_gpu(lengths: tuple[int, int], load: float) -> None:
    """Mean lengths leave out what long requests cost by themselves, on one GPU too: 0.67 to 1.13 of the time."""

    def ratio(tp: int, pp: int) -> float:
        service, steps = seven_b(tp, pp, lengths)
        simulated_s, forecast_s, _ = simulated_and_forecast_s(service, steps, load * service.requests_per_s(256))
        return forecast_s / simulated_s

    alone = ratio(1, 1)
    assert {split: ratio(*split) / alone for split in [(1, 2), (1, 4), (2, 2)]} == pytest.approx(
        dict.fromkeys([(1, 2), (1, 4), (2, 2)], 1.0), rel=0.16
    )
