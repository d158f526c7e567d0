"""The processor sharing that look-ahead's closed form is held against."""

from __future__ import annotations

import random

import pytest

from tests.bench.look_ahead import GPUS, Caller, World, judged, mean_under_way


def test_alone_requests_take_their_own_time_and_two_at_once_twice_as_long() -> None:
    one, other = GPUS[:1], GPUS[1:2]
    assert mean_under_way([(one, [(0.0, 1.0), (5.0, 2.0)])], 10.0) == pytest.approx(0.3)
    assert mean_under_way([(one, [(0.0, 1.0)]), (one, [(0.0, 1.0)])], 10.0) == pytest.approx(0.4)
    assert mean_under_way([(one, [(0.0, 1.0)]), (other, [(0.0, 1.0)])], 10.0) == pytest.approx(0.2)


def test_a_group_is_as_slow_as_its_slowest_gpu() -> None:
    both, one = GPUS[:2], GPUS[1:2]
    assert mean_under_way([(both, [(0.0, 1.0)]), (one, [(0.0, 2.0)])], 1.0) == pytest.approx(2.0 + 3.0)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_long_run_of_one_gpu_is_m_g_1_processor_sharing(load: float) -> None:
    """Kleinrock: r / (1 - r) requests, whatever the lengths."""
    caller = Caller(GPUS[:1], rate=load / 0.5, mean_s=0.5, cv=1.0)
    found = mean_under_way([(caller.gpus, caller.calls(10_000.0, random.Random(1)))], 10_000.0)
    assert found == pytest.approx(load / (1 - load), rel=0.1)


@pytest.mark.slow
def test_beside_a_full_gpu_both_take_an_empty_one() -> None:
    there = tuple(Caller((gpu,), rate=1.0, mean_s=0.5, cv=1.0) for gpu in GPUS[:-1])
    found = judged(World(there, Caller(GPUS[:1], rate=0.2, mean_s=1.0, cv=1.0)), random.Random(2))
    assert (found.closed_form_excess, found.simulation_excess) == (0.0, 0.0)
    assert found.random_excess > 0.05
