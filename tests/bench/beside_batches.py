"""Interference between workers that batch: the load model against the simulator.

Run: ``python -m tests.bench.beside_batches [--requests N]``.

Llama-2-7B by the roofline of an H200, 32 slots, lengths of the synthetic conversation and code traces, Poisson
arrivals. Rates are parts of what a worker alone on its GPUs serves at most, by the load model. That model
(``placement.batch_load``, ``placement.others``) is given rates and mean lengths and nothing of the simulation; it
has no constant that could be fitted. Compared:

*   *busy*: the share of the time that a lone worker runs a step.
*   *slower*: how many times as long as on idle GPUs the requests of a newcomer with a low rate stay, next to
    neighbours with a rate; the mean over the same requests. Next to it what the GPUs' load alone says, as
    busy as they were without the newcomer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from fingerprint.config import DeploymentConfig
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from placement.batch_load import Batching
from placement.load_model import shares
from placement.others import Others
from placement.types import ClusterSnapshot, DeploymentState, Placement, ReplicaState, Stays
from tests.bench.rank import machine
from tests.fingerprint.step_timed_machine import llama_7b
from tests.traces.simulator.worlds import cluster, deploy_all, placed_on
from traces.arrivals import Poisson
from traces.generate import generate
from traces.request import Request
from traces.simulator.contention import processor_sharing
from traces.simulator.deployment_state import stays
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deployed, Policies, Scenario
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits, StepModel, tabulate
from traces.synthetic import standin

SLOTS = 32
NEWCOMER = "new"
LOADS = (0.02, 0.1, 0.3, 0.6, 0.9, 1.2)
RARE = 0.01  # of what it could serve, the newcomer


class World(NamedTuple):
    """Placement of the newcomer and its neighbours."""

    name: str
    trace: str
    newcomer: Placement
    neighbours: tuple[Placement, ...]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.trace.removeprefix('azure-')}"


ONE, TWO, PIPE = placed_on("gpu0"), placed_on("gpu0", "gpu1"), placed_on("gpu0", "gpu1", pp=2)
PLACES = (
    ("one on the same GPU", ONE, (ONE,)),
    ("two on the same GPU", ONE, (ONE, ONE)),
    ("a TP group over it and another", ONE, (TWO,)),
    ("a pipeline over it and another", ONE, (PIPE,)),
    ("a TP group beside one on each GPU", TWO, (ONE, placed_on("gpu1"))),
)
WORLDS = tuple(World(name, trace, *where) for name, *where in PLACES for trace in ("azure-conv", "azure-code"))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Compared:
    world: str
    load: float
    simulated: float
    predicted: float
    by_load: float | None = None  # alone


@cache
def step_model(tp: int, pp: int) -> StepModel:
    limits = Limits(max_batch=SLOTS, max_context_tokens=16_384, max_batched_tokens=8192)
    config = DeploymentConfig(tp=tp, pp=pp, engine="vllm")
    return tabulate(RooflineEstimator(llama_7b(), gpu_spec("h200")), config, limits)


def steps_at(place: Placement) -> StepModel:
    return step_model(len(place.stages[0].device_ids), len(place.stages))


def requests_of(trace: str, requests_per_s: float, count: int, name: str, seed: int) -> list[Request]:
    lengths = standin(trace).lengths
    return list(generate(Poisson(requests_per_s), lengths, seed=seed, num_requests=count, models=(name,)))


def stays_of(place: Placement, requests: Sequence[Request]) -> Stays:
    """Return the times in service by the configuration map and the mean lengths."""
    inputs, outputs = (
        np.mean([getattr(r, which) for r in requests]) for which in ("input_tokens", "output_tokens")
    )
    return stays(steps_at(place), float(inputs), float(outputs))


def highest_rate(place: Placement, trace: str) -> float:
    """Return the highest rate that the worker serves, alone."""
    told, batches = stays_of(place, requests_of(trace, 1.0, 20_000, "", 0)), len(place.stages)
    grows = (told.full_s - told.alone_s) / (SLOTS - 1)
    return SLOTS / (told.alone_s + grows * (SLOTS / batches - 1))


class _Fixed:
    name = "fixed"

    def __init__(self, places: dict[str, Placement]) -> None:
        self._places = places

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed:
        place = self._places[model]
        return Deployed(placement=place, steps=steps_at(place), what=model, pipelined=len(place.stages) > 1)


def run(places: dict[str, Placement], requests: Sequence[Request]) -> SimulationResult:
    scenario = Scenario(cluster=cluster(2), actions=deploy_all(*places), most_waiting=10**9)
    policies = Policies(deployer=_Fixed(places), contention=processor_sharing)  # as the planner's model has it
    return simulate(sorted(requests, key=lambda r: r.arrival_s), scenario, policies)


def stayed(result: SimulationResult, name: str, until_s: float) -> np.ndarray:
    outcomes = result.outcomes
    of = outcomes.deployment == outcomes.deployments.index(name)
    found: np.ndarray = np.asarray(outcomes.e2e_s)[of & (outcomes.arrival_s < until_s)]
    return found


def told(name: str, place: Placement, requests: Sequence[Request], requests_per_s: float) -> DeploymentState:
    """Return the state as the gateway and the plan would give it."""
    replica = ReplicaState(
        replica_id=name, placement=place, ready=True, outstanding=0, max_batch=SLOTS, batches=len(place.stages)
    )
    return DeploymentState(
        name=name,
        model=name,
        wanted=1,
        replicas=(replica,),
        moving=False,
        waiting=0,
        requests_per_s=requests_per_s,
        service_s=1.0,
        idle_s=0.0,
        steady_s=1000.0,
        stays=stays_of(place, requests),
    )


def busy(trace: str, load: float, count: int, place: Placement = ONE) -> Compared:
    """Compare the busy time of a lone worker."""
    rate = load * highest_rate(place, trace)
    requests = requests_of(trace, rate, count, "a", 1)
    result = run({"a": place}, requests)
    tells = stays_of(place, requests)
    tenant = Batching(rate, tells.alone_s, tells.full_s, SLOTS, len(place.stages), shares(place))
    until_s = requests[-1].arrival_s
    simulated = result.gpus[0].busy_fraction * result.end_s / until_s
    predicted = tenant.under_way(1.0) * tenant.stages[0][0]
    return Compared(f"lone, {trace}, {len(place.stages)} stages", load, min(1.0, simulated), predicted)


def slower(world: World, load: float, count: int) -> Compared:
    """Compare the newcomer's requests, next to neighbours at this part of their highest rate."""
    own_rate = RARE * highest_rate(world.newcomer, world.trace)
    own = requests_of(world.trace, own_rate, max(50, round(count * RARE / load)), NEWCOMER, 2)
    until_s = own[-1].arrival_s
    places, others, states = {NEWCOMER: world.newcomer}, list[Request](), []
    for index, place in enumerate(world.neighbours):
        name, rate = f"a{index}", load * highest_rate(place, world.trace)
        places[name] = place
        many = requests_of(world.trace, rate, round(1.2 * rate * until_s) + 50, name, 10 + index)
        of = [request for request in many if request.arrival_s < until_s]
        others += of
        states.append(told(name, place, of, rate))
    alone, without, both = run(places, own), run(places, others), run(places, [*own, *others])
    simulated = float(stayed(both, NEWCOMER, until_s).mean() / stayed(alone, NEWCOMER, until_s).mean())
    idle = cluster(2).gpus
    model = Others(ClusterSnapshot(idle, tuple(states)))
    busy_fractions = (min(1.0, gpu.busy_fraction * without.end_s / until_s) for gpu in without.gpus)
    seen = tuple(replace(gpu, load_fraction=busy) for gpu, busy in zip(idle, busy_fractions, strict=True))
    by_load = Others(ClusterSnapshot(seen)).slowdown(world.newcomer)
    return Compared(world.label, load, simulated, model.slowdown(world.newcomer), by_load)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="of each neighbour, about")
    options = parser.parse_args(arguments)
    print(machine())
    for trace in ("azure-conv", "azure-code"):
        for place in (ONE, PIPE):
            for load in LOADS[:-1]:
                one = busy(trace, load, options.requests, place)
                print(
                    f"busy    {one.world:44s} {load:5.2f}  {one.simulated:6.3f} {one.predicted:6.3f}", flush=True
                )
    for world in WORLDS:
        for load in LOADS:
            one = slower(world, load, options.requests)
            print(
                f"slower  {one.world:44s} {load:5.2f}  {one.simulated:6.2f} {one.predicted:6.2f} "
                f"{one.by_load:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
