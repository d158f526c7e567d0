"""The cost of a repeat outside its layers, where two depths were not measured alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.l3 import L3
from fingerprint.estimators.repeat_overhead import repeat_overheads, token_bound_s
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import Profile, TimingPoint
from tests.fingerprint.step_timed_machine import StepTimedMachine, take_depth_tied

VLLM = DeploymentConfig(engine="vllm")


def slower_prompts(profile: Profile, times: float, at: set[tuple[int, int]]) -> Profile:
    """Return the profile of a shallower cut whose bursts at some points take so many times as long.

    As a mixture's do where prompts that are handed over at once fall into one step or into two.
    """

    def told(point: TimingPoint) -> TimingPoint:
        if point.num_layers > 1 or point.output_tokens > 1 or (point.batch, point.input_tokens) not in at:
            return point
        runs = []
        for run in point.runs:
            steps = tuple(replace(s, forward_s=s.forward_s * times) for s in run.steps)
            more_s = sum(s.forward_s for s in run.steps) * (times - 1)
            runs.append(replace(run, steps=steps, e2e_s=run.e2e_s + more_s))
        return replace(point, runs=tuple(runs))

    return replace(profile, timing=tuple(map(told, profile.timing)))


def test_two_depths_whose_prompts_fell_into_other_steps_take_nothing_off_a_long_prompt() -> None:
    """Such a difference is no token's cost: no embedding and no norm moves so much."""
    machine = StepTimedMachine()
    honest = take_depth_tied(machine, shallow_points=((1, 128), (1, 1024), (8, 128), (8, 1024)))
    told = slower_prompts(honest, 1.4, {(8, 128), (8, 1024)})
    most = token_bound_s(machine.spec, machine.machine().device)
    unbounded, _ = repeat_overheads(told.timing, machine.spec.num_layers)
    assert unbounded.per_token_s > 10 * most, "else these bursts show nothing"
    found = L3(told, RooflineEstimator(machine.spec, told.machine.device), Calibration())
    for at in ((8, 1024), (32, 512)):
        ttft_s = found.latency(VLLM, Workload(*at, 2)).ttft_s.value
        assert ttft_s == pytest.approx(machine.ttft_s(*at), rel=0.03)


def test_a_host_that_was_slower_at_one_depth_takes_no_layers_off_a_lone_prompt() -> None:
    """A prompt's layers take what a decode step's do at least, which bounds what a repeat can cost."""
    machine = StepTimedMachine()
    honest = take_depth_tied(machine, shallow_points=((1, 128), (1, 1024), (8, 128)))
    told = slower_prompts(honest, 3, {(1, 128), (1, 1024), (8, 128)})
    (step,) = {
        min(s.forward_s for run in point.runs for s in run.steps)
        for point in told.timing
        if (point.num_layers, point.batch, point.input_tokens) == (2, 1, 128) and point.output_tokens > 1
    }
    prompts, decoding = repeat_overheads(told.timing, machine.spec.num_layers)
    (prompt,) = {
        run.steps[0].forward_s
        for point in told.timing
        if (point.num_layers, point.batch, point.input_tokens, point.output_tokens) == (2, 1, 128, 1)
        for run in point.runs[-1:]
    }
    assert prompts.per_pass_s == pytest.approx((prompt - step) / 16 + decoding.at(1, 1), rel=1e-6)
    found = L3(told, RooflineEstimator(machine.spec, told.machine.device), Calibration())
    ttft_s = found.latency(VLLM, Workload(1, 128, 2)).ttft_s.value
    assert 0.75 * machine.ttft_s(1, 128) < ttft_s < machine.ttft_s(1, 128)


@pytest.mark.parametrize("factor", [1.5, 2.0, 5.0, 20.0])
def test_depths_that_contradict_each_other_about_prompts_are_said_to(factor: float) -> None:
    """The prompts of one layer took as if a repeat cost what none can."""
    machine = StepTimedMachine()
    honest = take_depth_tied(machine)
    told = slower_prompts(honest, factor, {(p.batch, p.input_tokens) for p in honest.timing})
    found, plain = (
        L3(one, RooflineEstimator(machine.spec, one.machine.device), Calibration()) for one in (told, honest)
    )
    assert plain.unusable == ()
    assert found.unusable  # calls that contradict each other at a point are named too
    assert all(sentence.startswith("tp=1 pp=1 16bit: ") for sentence in found.unusable)
