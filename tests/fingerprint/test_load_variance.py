"""Variation between loads, against machines whose loads differ by a known amount."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.estimators.l2 import L2
from fingerprint.estimators.load_variance import Spread, load_spread, share_of_loads
from fingerprint.measurements import RunReading, TimingPoint
from fingerprint.profile import ProfilePlan
from tests.fingerprint.synthetic_machine import SyntheticMachine, take_profile

PLAN = ProfilePlan(
    budget_s=1e6,
    min_repeats=4,
    max_repeats=4,
    degrees=((1, 1),),
    weights=(WeightFormat.BITS16, WeightFormat.INT8),
)


def spreads(plan=PLAN, seeds=40, **machine):
    found = [
        load_spread(take_profile(SyntheticMachine(seed=seed, **machine), plan).timing) for seed in range(seeds)
    ]
    return [np.sqrt(np.mean([getattr(s, kind).relative ** 2 for s in found])) for kind in ("first", "next")]


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("load_noise", [0.05, 0.15])
def test_a_known_spread_is_found(noise, load_noise):
    assert spreads(noise=noise, load_noise=load_noise) == pytest.approx([load_noise, load_noise], rel=0.2)


def test_noise_of_the_runs_is_averaged_before_it_counts():
    """The noise of 10% a run is 3 to 5% of a load's level for a prefill: the mean of 4 bursts of 1 or 2 runs.

    A step is computed from the difference of two runs that are longer than it.
    """
    first, step = spreads(noise=0.1)
    assert 0.03 < first < 0.05
    assert first < step < 0.2


def test_without_any_noise_there_is_none():
    found = load_spread(take_profile(SyntheticMachine(), PLAN).timing)
    assert (found.first.relative, found.next.relative) == pytest.approx((0.0, 0.0), abs=1e-7)


def point(output_tokens, runs, loads, batch=1):
    readings = tuple(RunReading(e2e_s=s, device_s=s, host_s=0.0) for s in runs)
    return TimingPoint(
        num_layers=1, tp=1, pp=1, weights=WeightFormat.BITS16, kv="16bit", batch=batch, input_tokens=8,
        output_tokens=output_tokens, runs=readings, loads=loads,
    )  # fmt: skip


def test_prefill_and_step_are_told_apart():
    """Two loads, one point: a prefill of 0.9 and 1.1 s, ten steps of 1 s in both. sd of (-0.1, 0.1) is 0.1414."""
    found = load_spread([point(1, (0.9, 1.1), (1, 2)), point(11, (10.9, 11.1), (1, 2))])
    assert found.first.relative == pytest.approx(math.sqrt(0.02))
    assert found.next.relative == pytest.approx(0.0, abs=1e-9)
    assert (found.first.dof, found.next.dof) == (1, 1)


def test_runs_of_one_load_are_one_observation():
    once = load_spread([point(1, (0.9, 1.1), (1, 2))]).first
    often = load_spread([point(1, (0.9, 0.9, 0.9, 1.1, 1.1, 1.1), (1, 1, 1, 2, 2, 2))]).first
    assert often == once


def test_a_load_that_did_not_run_every_point_tells_nothing_of_the_level():
    lone = [point(1, (1.0, 1.0, 5.0), (1, 2, 3)), point(1, (2.0, 2.0), (1, 2), batch=4)]
    assert load_spread(lone).first.relative == 0.0


def test_what_was_loaded_once_is_assumed_and_what_does_not_say_is_not():
    once = load_spread([point(1, (0.9, 1.1), (1, 1))])
    assert once.first == Spread(0.15, math.inf)
    assert not once.is_measured
    assert load_spread([point(1, (0.9, 1.1), ())]).first == Spread(0.0, math.inf)


@pytest.mark.parametrize(
    ("loads", "share"), [((1, 2), 1 / 2), ((1, 1, 2, 2, 3, 3), 1 / 3), ((1, 1, 1, 2), (9 + 1) / 16), ((), 1.0)]
)
def test_share_of_one_load_in_the_mean(loads, share):
    assert share_of_loads([point(1, (1.0,) * len(loads), loads)]) == pytest.approx(share)


def test_a_degree_that_was_loaded_once_has_the_spread_of_the_others():
    plan = replace(PLAN, degrees=((1, 1), (2, 1)))
    profile = take_profile(SyntheticMachine(load_noise=0.1, seed=1), plan)

    def once(found):
        kept = [run for run, load in zip(found.runs, found.loads, strict=True) if load == found.loads[0]]
        return replace(found, runs=tuple(kept), loads=(found.loads[0],) * len(kept))

    lame = replace(profile, timing=tuple(once(p) if p.tp == 2 else p for p in profile.timing))
    config, workload = DeploymentConfig(tp=2), Workload(4, 512, 17)
    whole, less = (L2(p).latency(config, workload).ttft_s for p in (profile, lame))
    assert math.isfinite(less.high)
    assert less.high - less.low > whole.high - whole.low
