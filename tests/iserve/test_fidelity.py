"""The simulator against the embedded engine's scheduler, whose steps take a known time: on no machine's clock.

The simulator is given what bursts tell of those steps, as it is of a real worker (test_fidelity_worker.py), and
the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator, MemoryEstimate, Quantity
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_config, read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import MachineInfo, Profile
from iserve.demo import demo_model_path
from iserve.simulation.running import launch_limits
from tests.bench.fidelity_compare import Served, paced, saturated_rate, simulated, simulated_requests
from tests.bench.fidelity_steps import BurstTime, lone_request, whole_profile
from tests.iserve.fixed_step_worker import FixedStepWorker
from traces.outcomes import Outcomes
from traces.request import Request
from traces.trace_argument import requests_of
from traces.transforms import cap_lengths

__all__ = ["LIMITS", "WORK", "ratios", "requests_of_trace", "served_by_steps", "slower", "spearman"]

CONFIG, WORK = DeploymentConfig(), Workload(4, 96, 32)
LIMITS = launch_limits(WORK, "torch")
REQUESTS = 200
WITHIN = 1.05  # either way, each percentile
CORRELATED = 0.99  # at least, the order of the requests
# What a profile of the worker's own steps is put into; the device's figures give ratios only.
NO_PROFILE = Profile(
    model="demo",
    spec=read_spec(read_config(demo_model_path())),
    engine="torch",
    machine=MachineInfo(
        device=gpu_spec("a6000"), num_devices=1, cores_per_device=1, cpu_model="", driver=None, versions=()
    ),
    created_at="",
    budget_s=0.0,
    spent_s=0.0,
    complete=False,
    memory=(),
    timing=(),
)


class RooflineMemory:
    """Memory of an estimate, which no simulated worker is asked for."""

    def __init__(self, roofline: Estimator) -> None:
        self._roofline = roofline

    def memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        return self._roofline.estimate(config, workload).memory


def served_by_steps(burst: BurstTime, config: DeploymentConfig = CONFIG, *, max_seconds: float = 0.0) -> Served:
    """Return what the simulator is given of a worker: its launch, and its steps as bursts tell them."""
    lone = lone_request(burst)
    times = whole_profile(burst, NO_PROFILE, config, WORK, beside_s=lone.beside_s, max_seconds=max_seconds)
    roofline = RooflineEstimator(times.spec, times.machine.device)
    estimator = FingerprintedEstimator(times, roofline)
    estimator.memory = RooflineMemory(roofline)  # type: ignore[assignment]
    return Served(
        gpu=times.machine.device,
        num_layers=times.spec.num_layers,
        config=config,
        limits=LIMITS,
        estimator=estimator,
        behind_gateway=False,
        overhead_s=lone.beside_s,
    )


@dataclass(frozen=True)
class Slower:
    """Every time ``factor`` times as long."""

    base: Estimator
    factor: float
    name: str = "slower"

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        found = self.base.estimate(config, workload)
        return replace(found, ttft_s=self._of(found.ttft_s), tpot_s=self._of(found.tpot_s))

    def _of(self, time: Quantity) -> Quantity:
        return Quantity(time.value * self.factor, time.low * self.factor, time.high * self.factor, time.source)


def slower(served: Served, factor: float) -> Served:
    return replace(served, estimator=Slower(served.estimator, factor), overhead_s=served.overhead_s * factor)


def requests_of_trace(count: int, seed: int) -> list[Request]:
    trace = requests_of("synthetic:azure-conv", seed=seed)
    return list(islice(cap_lengths(trace, context_tokens=WORK.context_tokens), count))


def ratios(model: Outcomes, real: Outcomes) -> dict[tuple[str, int], float]:
    """Return percentiles of E2E and TTFT, simulated over measured."""
    sides = {
        "e2e": (model.e2e_s, real.e2e_from_send_s),
        "ttft": (model.ttft_s, real.ttft_from_send_s),
    }
    return {
        (metric, percentile): float(np.percentile(one, percentile) / np.percentile(other, percentile))
        for metric, (one, other) in sides.items()
        for percentile in (50, 90)
    }


def spearman(model: Outcomes, real: Outcomes) -> float:
    """Return the rank correlation of the requests by their E2E."""
    ranks = [np.argsort(np.argsort(side)) for side in (real.e2e_from_send_s, model.e2e_s)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.fixture(scope="module")
def worker() -> FixedStepWorker:
    return FixedStepWorker(LIMITS)


@pytest.fixture(scope="module")
def served(worker: FixedStepWorker) -> Served:
    return served_by_steps(worker.burst_s)


@pytest.fixture(scope="module", params=[0.3, 0.6, 0.9, 1.2])
def real(request: pytest.FixtureRequest, worker: FixedStepWorker) -> Outcomes:
    """A trace at that share of what the worker serves when it is saturated."""
    requests = requests_of_trace(REQUESTS, seed=3)
    at_once = [replace(one, arrival_s=0.0) for one in requests]
    rate = saturated_rate(worker.serve(at_once), WORK.batch)
    return worker.serve(paced(requests, request.param * rate))


def test_every_request_ends_with_the_tokens_that_were_asked(served: Served, real: Outcomes) -> None:
    model = simulated(real, served)
    assert len(model) == REQUESTS
    assert model.completed.all()
    assert model.output_tokens.tolist() == real.output_tokens.tolist() == real.asked_output_tokens.tolist()


def test_times_are_the_engines(served: Served, real: Outcomes) -> None:
    found = ratios(simulated(real, served), real)
    assert all(1 / WITHIN < ratio < WITHIN for ratio in found.values()), f"simulated over measured: {found}"


@pytest.mark.parametrize("factor", [1 / 1.1, 1.1])
def test_steps_that_are_wrong_would_be_found(served: Served, real: Outcomes, factor: float) -> None:
    found = ratios(simulated(real, slower(served, factor)), real)
    assert any(not 1 / WITHIN < ratio < WITHIN for ratio in found.values()), f"simulated over measured: {found}"


def test_requests_that_take_long_are_those_that_are_simulated_to(served: Served, real: Outcomes) -> None:
    assert spearman(simulated(real, served), real) > CORRELATED


def test_it_serves_as_many_when_it_is_saturated(worker: FixedStepWorker, served: Served) -> None:
    at_once = [replace(one, arrival_s=0.0) for one in requests_of_trace(REQUESTS, seed=3)]
    rates = [
        saturated_rate(side, WORK.batch) for side in (worker.serve(at_once), simulated_requests(at_once, served))
    ]
    assert rates[1] == pytest.approx(rates[0], rel=0.01)


@pytest.mark.parametrize("pace", [0.1, 7.0])
def test_no_machine_is_too_slow_for_it(pace: float) -> None:
    """Steps that all take ``pace`` times as long are measured and simulated as such."""
    worker = FixedStepWorker(LIMITS, pace=pace)
    requests = [replace(one, arrival_s=pace * one.arrival_s / 50) for one in requests_of_trace(REQUESTS, seed=5)]
    real = worker.serve(requests)
    found = ratios(simulated(real, served_by_steps(worker.burst_s)), real)
    assert all(1 / WITHIN < ratio < WITHIN for ratio in found.values()), f"simulated over measured: {found}"
