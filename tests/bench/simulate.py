"""Time of simulating one million requests. Run: ``python -m tests.bench.simulate [--json FILE]``.

Llama-2-7B by the roofline of an A6000, prompts and answers of the synthetic conversation trace (arrivals Poisson,
so that the load is steady), unless the case says otherwise. The requests are made beforehand; what making them
takes is reported apart. Times are CPU time of the process, which is kept on one core; placement is fixed, the
planner is not in it. Before a time counts, every request must have ended, and a small part of the case must have
the same times by the engine's own scheduler, step by step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.simulation.running import EngineBatcher, idle_cluster
from placement.types import ClusterSnapshot, Placement, StagePlacement
from tests.bench.rank import machine
from tests.fingerprint.step_timed_machine import llama_7b
from tests.traces.simulator.preempting_reference import StepByStep
from traces.arrivals import Poisson
from traces.generate import generate
from traces.lengths import LengthModel
from traces.popularity import Distinct
from traces.request import Request
from traces.simulator.contention import ProcessorSharing
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deploy, Deployed, NotDeployed, Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits, StepModel, tabulate
from traces.synthetic import standin

GOAL_S = 30.0
CHECKED = 1500  # requests, step by step
A6000 = gpu_spec("a6000")


class Case(NamedTuple):
    name: str
    service: Service
    models: int
    gpus: int
    max_batch: int
    requests_per_s: float  # of each model
    longer: int = 1  # answers times this
    tp: int = 1  # above 1: each model on the first ``tp`` GPUs
    kv_tokens: int | None = None  # admission by prompts, and preemption in so much room; None: slots have room


CASES = (
    Case("fcfs, 1 GPU", Service.FCFS, 1, 1, 1, 0.15),
    Case("fcfs, 8 models on 4 GPUs", Service.FCFS, 8, 4, 1, 0.07),
    Case("32 slots, 1 GPU", Service.CONTINUOUS, 1, 1, 32, 1.4),
    Case("32 slots, 1 GPU, overloaded", Service.CONTINUOUS, 1, 1, 32, 5.0),
    Case("256 slots, 8 GPUs", Service.CONTINUOUS, 8, 8, 256, 1.8),
    Case("32 slots, 8 models on 4 GPUs", Service.CONTINUOUS, 8, 4, 32, 0.6),
    Case("32 slots, answers 10 times as long", Service.CONTINUOUS, 1, 1, 32, 0.12, 10),
    Case("32 slots, 200 models on 100 GPUs", Service.CONTINUOUS, 200, 100, 32, 0.6),
    Case("32 slots, 6 models on the same 8 GPUs", Service.CONTINUOUS, 6, 8, 32, 0.1, 1, 8),
    Case("256 slots, KV of 40,000 tokens", Service.CONTINUOUS, 1, 1, 256, 1.4, 1, 1, 40_000),
    Case("256 slots, KV of 40,000, overloaded", Service.CONTINUOUS, 1, 1, 256, 5.0, 1, 1, 40_000),
    Case("256 slots, KV of 400,000, overloaded", Service.CONTINUOUS, 1, 1, 256, 5.0, 1, 1, 400_000),
    Case("the same, answers 10 times as long", Service.CONTINUOUS, 1, 1, 256, 5.0, 10, 1, 400_000),
)


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    case: str
    requests: int
    simulate_s: float
    making_requests_s: float
    busy_fraction: float  # mean over GPUs
    e2e_p50_s: float
    simulated_s: float
    output_tokens: int
    preemptions: int
    machine: str


@dataclass(frozen=True, slots=True)
class Longer:
    """Answers times ``factor``."""

    lengths: LengthModel
    factor: int

    def sample(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, outputs = self.lengths.sample(rng, count)
        return inputs, outputs * self.factor


class Spread:
    """Model number i on GPU i, around again after the last; or all on the first ``tp``."""

    name = "spread"

    def __init__(self, steps: StepModel, tp: int) -> None:
        self._steps, self._tp = steps, tp

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        first = 0 if self._tp > 1 else int(model) % len(snapshot.gpus)
        stage = StagePlacement(
            node_id=snapshot.gpus[first].node_id,
            device_ids=tuple(gpu.device_id for gpu in snapshot.gpus[first : first + self._tp]),
            first_layer=0,
            num_layers=32,
            bytes_per_gpu=2**30,
        )
        return Deployed(placement=Placement((stage,)), steps=self._steps, what="fixed")


@cache
def step_model(max_batch: int, tp: int, kv_tokens: int | None) -> StepModel:
    limits = Limits(
        max_batch=max_batch,
        max_context_tokens=32_768,
        max_batched_tokens=8192,
        kv_tokens=kv_tokens,
        preempts=kv_tokens is not None,
    )
    return tabulate(RooflineEstimator(llama_7b(), A6000), DeploymentConfig(tp=tp), limits)


def requests_of(case: Case, count: int) -> list[Request]:
    names = [str(i) for i in range(case.models)]
    lengths = Longer(standin("azure-conv").lengths, case.longer)
    arrivals = Poisson(case.requests_per_s * case.models)
    # Models in turn: what each gets is then an even part of the arrivals.
    return list(
        generate(arrivals, lengths, seed=20261121, num_requests=count, models=names, popularity=Distinct())
    )


def run(case: Case, requests: list[Request]) -> SimulationResult:
    scenario = Scenario(
        cluster=idle_cluster(A6000, case.gpus),
        actions=tuple(Deploy(at_s=0.0, name=str(i), model=str(i)) for i in range(case.models)),
        service=case.service,
        most_waiting=max(1, len(requests)),
    )
    deployer = Spread(step_model(case.max_batch, case.tp, case.kv_tokens), case.tp)
    policies = Policies(deployer=deployer, make_batcher=EngineBatcher, contention=ProcessorSharing())
    return simulate(requests, scenario, policies)


def last_tokens_step_by_step(case: Case, requests: list[Request]) -> np.ndarray:
    """Return when requests end by a scheduler step by step: the engine's own, or the rule that preempts."""
    if case.kv_tokens is None:
        return run(case._replace(service=Service.STEPPED), requests).outcomes.last_token_s
    return np.array(StepByStep(requests, step_model(case.max_batch, case.tp, case.kv_tokens)).last)


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start_s = time.process_time()
    made = work()
    return time.process_time() - start_s, made


def measure(case: Case, count: int) -> BenchResult:
    step_model(case.max_batch, case.tp, case.kv_tokens)
    making_s, requests = timed(lambda: requests_of(case, count))
    assert isinstance(requests, list)
    part = list(islice(requests, CHECKED))
    true = last_tokens_step_by_step(case, part)
    np.testing.assert_allclose(run(case, part).outcomes.last_token_s, true, rtol=1e-8)
    simulate_s, result = timed(lambda: run(case, requests))
    assert isinstance(result, SimulationResult)
    outcomes = result.outcomes
    assert len(outcomes) == count
    assert outcomes.completed.all()
    return BenchResult(
        case=case.name,
        requests=count,
        simulate_s=simulate_s,
        making_requests_s=making_s,
        busy_fraction=float(np.mean([gpu.busy_fraction for gpu in result.gpus])),
        e2e_p50_s=float(np.median(outcomes.e2e_s)),
        simulated_s=result.end_s,
        output_tokens=int(outcomes.output_tokens.sum()),
        preemptions=sum(each.kv.preemptions for each in result.deployments if each.kv is not None),
        machine=machine(),
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--requests", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = []
    print(machine())
    for case in CASES:
        r = measure(case, options.requests)
        results.append(r)
        print(
            f"{r.case:36s} {r.requests:,} requests: {r.simulate_s:5.1f} s (goal {GOAL_S:g}), made in "
            f"{r.making_requests_s:.1f} s; GPUs busy {r.busy_fraction:.0%}, E2E p50 {r.e2e_p50_s:,.1f} s, "
            f"{r.output_tokens / 1e6:,.0f} M tokens in {r.simulated_s / 86_400:,.1f} days, "
            f"{r.preemptions:,} preemptions",
            flush=True,
        )
    if options.json:
        options.json.write_bytes(to_json(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
