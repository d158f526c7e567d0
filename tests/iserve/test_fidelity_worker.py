"""The simulator against a worker with the demo model that a trace is replayed to. What is held to times runs in
`make test-long`, on a machine that does little else; without a clock test_fidelity.py holds the same.

A disturbed stretch says nothing of the simulator, so there are several until one is within the bounds, and the
best is held to them; a simulator that is wrong is wrong in all of them, as the test below with wrong steps shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from daemon.worker_spec import WorkerLimits
from tests.bench.fidelity import Target, pace_s, replayed, streamed_burst_s
from tests.bench.fidelity_compare import Served, paced, saturated_rate, simulated, simulated_requests
from tests.daemon.torch_engine.conftest import Launched, launch, make_spec
from tests.iserve.fixed_step_worker import FixedStepWorker
from tests.iserve.test_fidelity import (
    LIMITS,
    WORK,
    ratios,
    requests_of_trace,
    served_by_steps,
    slower,
    spearman,
)
from traces.outcomes import Outcomes

__all__ = ["launch"]  # a fixture

STRETCHES, REQUESTS = 3, 16
LOAD = 0.5  # of what the steps say it serves
WORKER_LIMITS = WorkerLimits(
    max_batch=LIMITS.max_batch,
    max_batched_tokens=LIMITS.max_batched_tokens,
    max_context_tokens=LIMITS.max_context_tokens,
    kv_tokens=LIMITS.max_batch * LIMITS.max_context_tokens,
    memory_bytes_per_device=2**30,
)
# Of each, either way; CI's cores are shared, and of 16 requests a P99 is one.
WITHIN = {("e2e", 50): 1.6, ("e2e", 90): 1.8, ("ttft", 50): 1.8, ("ttft", 90): 2.5}
CORRELATED = 0.7  # at least, the order of the requests


@dataclass(frozen=True)
class Stretch:
    real: Outcomes
    pace: float  # of bursts during it, over those when steps were measured


@pytest.fixture(scope="module")
def target(launch: Callable[..., Launched]) -> Target:
    """A worker with the demo, launched as a deploy would."""
    spec = make_spec(served_model="fidelity", limits=WORKER_LIMITS)
    worker = launch(spec)
    worker.wait_ready()
    return Target(url=worker.url, model="fidelity", config=spec.config, workload=WORK, limits=LIMITS)


def test_every_request_ends_on_both_sides_with_the_tokens_that_were_asked(target: Target) -> None:
    real = replayed(target, paced(requests_of_trace(REQUESTS, seed=0), 10.0))
    model = simulated(real, served_by_steps(FixedStepWorker(LIMITS).burst_s))
    assert len(real) == len(model) == REQUESTS
    assert real.completed.all()
    assert model.completed.all()
    assert real.output_tokens.tolist() == model.output_tokens.tolist()
    assert real.input_tokens.tolist() == model.input_tokens.tolist()


@pytest.fixture(scope="module")
def measured(target: Target) -> tuple[Served, list[Stretch]]:
    """The worker by its steps, and stretches of a trace replayed to it."""
    served = served_by_steps(partial(streamed_burst_s, target), target.config, max_seconds=1)
    calm_s = pace_s(target)
    stretches: list[Stretch] = []
    while len(stretches) < STRETCHES and not agrees(served, stretches):
        stretches.append(stretch(target, served, calm_s, len(stretches)))
    return served, stretches


def agrees(served: Served, stretches: list[Stretch]) -> bool:
    """Return whether the last one is within both bounds."""
    last = stretches[-1:]
    return bool(last) and worst(served, last[0]) < 1 and correlations(served, last)[0] > CORRELATED


def stretch(target: Target, served: Served, calm_s: float, seed: int) -> Stretch:
    """Replay at a rate that the machine, as fast as it is just now, serves with half of its time."""
    requests = requests_of_trace(REQUESTS, seed)
    before_s = pace_s(target)
    at_once = [replace(request, arrival_s=0.0) for request in requests]
    rate = saturated_rate(simulated_requests(at_once, slower(served, before_s / calm_s)), WORK.batch)
    real = replayed(target, paced(requests, LOAD * rate))
    return Stretch(real, (before_s + pace_s(target)) / 2 / calm_s)


def at_pace(served: Served, one: Stretch) -> dict[tuple[str, int], float]:
    """Return percentiles of a stretch as simulated at the machine's pace, over the measured ones."""
    return ratios(simulated(one.real, slower(served, one.pace)), one.real)


def worst(served: Served, one: Stretch) -> float:
    """Return how far the ratio that is farthest off is on the way to its bound: 1 there."""
    found = at_pace(served, one)
    return max(abs(np.log(found[which])) / np.log(bound) for which, bound in WITHIN.items())


def correlations(served: Served, stretches: list[Stretch]) -> list[float]:
    return [spearman(simulated(one.real, slower(served, one.pace)), one.real) for one in stretches]


@pytest.mark.long
def test_times_are_the_measured_ones_within_a_factor(measured: tuple[Served, list[Stretch]]) -> None:
    """In the least disturbed stretch all of them."""
    served, stretches = measured
    found = [at_pace(served, one) for one in stretches]
    assert min(worst(served, one) for one in stretches) < 1, f"simulated over measured: {found}"


@pytest.mark.long
@pytest.mark.parametrize("factor", [1 / 4, 4])
def test_steps_that_are_wrong_would_be_found(measured: tuple[Served, list[Stretch]], factor: float) -> None:
    served, stretches = measured
    wrong = slower(served, factor)
    found = [at_pace(wrong, one) for one in stretches]
    assert min(worst(wrong, one) for one in stretches) > 1, f"simulated over measured: {found}"


@pytest.mark.long
def test_requests_that_take_long_are_those_that_are_simulated_to(measured: tuple[Served, list[Stretch]]) -> None:
    """Whatever the pace."""
    found = correlations(*measured)
    assert max(found) > CORRELATED, f"correlations: {found}"
