"""Placement under a fluctuating load. Run: ``python -m tests.bench.placement_under_load [--json FILE]``.

Needs ``ISERVE_REFERENCE_DATA`` (published model shapes). Everything below was fixed before the first result, but
what is reported as changed.

*figure 10* of the paper: eight LLMs on eight A6000, one every 2 to 3 minutes over 30 minutes of Poisson arrivals
whose rate changes every 2 to 3 minutes, one request at a time, no batching. The paper does not say which LLMs,
configurations and rates. Here: Llama-2-7B, Llama-2-13B and GPT-J in turn, 16-bit, tp=2 (with two GPUs each,
least-loaded has used all eight GPUs after the fourth LLM, as in the paper); the conversation stand-in's lengths,
prompts up to 1,024 and answers up to 512 tokens; each LLM is sent a fraction, drawn from 0.075 to 0.25 for all
alike, of what it serves alone: four LLMs on one pair of GPUs are busy for 30% to 100%, the range of the paper's
section 8. One trace has some 400 requests, hence forty seeds (ten were meant at first, and one had been seen).

*planner*: the same for the paper's six LLMs (the first two twice), each configuration chosen by the planner: as it
is, seeing only how busy GPUs are ("by loads alone"), or as if they were idle. *planner, full pipelines*: with a
request in each stage of a pipeline. (In *figure 10* there are no pipelines.)

*elastic*: continuous batching, 16 slots, an hour; the same three LLMs are sent 0 to 2.5 times what one replica
serves, a new level every 5 to 8 minutes, one level in four being silence. A start takes 30 s. On eight GPUs, as it
was meant at first, four pairs face up to 7.5 pairs' work: two seeds showed that this measures overload. So it is
run on sixteen as well, which is enough for the highest level of all three. (Changed after results: a policy was
asked for each replica by itself at first, and hybrid put several of one LLM on one pair, as no deploy of iServe
does.)

An SLO is five times the request's own time alone at tp=2. Slowdown is E2E over that time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from iserve.planning.pipeline import PlanOptions
from iserve.simulation.running import PlannedDeployer, idle_cluster, launch_limits, roofline_model
from placement.actions import ClusterPolicy
from placement.fit import Placer, demand
from placement.lookahead import LookAhead
from placement.migration import Migration
from placement.placer_registry import FindsPlaces
from placement.policies import Hybrid, LeastLoaded, Packing
from placement.rebalancer import Elastic
from placement.replicas import ReplicaPlacer
from placement.routing import Busiest, LeastOutstanding, Router
from placement.scaling import Scaling
from placement.types import ClusterSnapshot, PlacementPolicy, Refusal
from planner.intent import Intent, IntentKind
from tests.bench.kept import read_kept, write_kept
from tests.bench.rank import machine
from traces.arrivals import RateSeries
from traces.generate import generate
from traces.request import Request
from traces.simulator.contention import processor_sharing
from traces.simulator.result import ChangeKind, SimulationResult
from traces.simulator.scenario import Deploy, Deployed, Deployer, NotDeployed, Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import StepModel, tabulate
from traces.synthetic import standin
from traces.transforms import merge

A6000 = gpu_spec("a6000")
SEEDS = tuple(range(20261121, 20261161))
MAX_INPUT, MAX_OUTPUT = 1024, 512
SLO_FACTOR = 5.0
THRESHOLDS = tuple(round(0.1 * i, 1) for i in range(1, 10))
GPU_PRICES = (0.05, 0.1, 0.25, 0.5, 1.0)
FIGURE_10 = ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf", "EleutherAI/gpt-j-6b")
PAPERS = (
    "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-70b-hf",
    "EleutherAI/gpt-j-6b", "tiiuae/falcon-7b", "tiiuae/falcon-40b",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class World:
    """Deployments and requests, the same for every policy."""

    seed: int
    duration_s: float
    models: tuple[tuple[str, float], ...]  # (model, deployed at); the deployment's name is its number
    requests: tuple[Request, ...]
    service: Service
    batch: int
    startup_s: float
    num_gpus: int = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    experiment: str
    policy: str
    seed: int
    requests: int
    unserved: int
    gpus_used: int  # that ever held a worker
    gpu_hours: float  # in which one held a worker, until the last answer
    e2e_mean_s: float
    cost_mean_gib_s: float  # of a request: memory of its deployment's first replica times E2E
    e2e_p50_s: float
    e2e_p95_s: float
    e2e_p99_s: float
    slowdown_p50: float
    slowdown_p95: float
    slowdown_p99: float
    slo_violation_fraction: float  # unserved ones included
    refused: int  # deployments that found no room
    changes: int  # scaled, drained, moved


@cache
def spec(model: str) -> ModelSpec:
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        sys.exit("ISERVE_REFERENCE_DATA does not name the folder of reference data")
    return read_spec(json.loads((Path(folder) / "reference" / "model-configs.json").read_text())[model])


def workload(batch: int) -> Workload:
    return Workload(batch, MAX_INPUT, MAX_OUTPUT)


@cache
def steps_of(model: str, batch: int) -> StepModel:
    """At tp=2, 16-bit."""
    return tabulate(
        RooflineEstimator(spec(model), A6000),
        DeploymentConfig(tp=2),
        launch_limits(workload(batch), DeploymentConfig().engine),
    )


@dataclass(frozen=True)
class Capped:
    """The conversation stand-in's lengths, cut to what deployments are planned for."""

    def sample(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, outputs = standin("azure-conv").lengths.sample(rng, count)
        return np.minimum(inputs, MAX_INPUT), np.minimum(outputs, MAX_OUTPUT)


def replica_rate(model: str, batch: int) -> float:
    """Requests per second that one replica serves alone, all slots full, by its step times at 2,000 lengths."""
    inputs, outputs = Capped().sample(np.random.default_rng(0), 2000)
    steps = steps_of(model, batch)
    each = [
        steps.prompt_s(i) + steps.run_s(batch, i + 1, o - 1) / batch
        for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True)
    ]
    return 1.0 / float(np.mean(each))


def levels(
    rng: random.Random, duration_s: float, span_s: tuple[int, int], draw: Callable[[], float]
) -> list[float]:
    """Return the level of every second: a level for a while, then another."""
    series: list[float] = []
    while len(series) < duration_s:
        series += [draw()] * rng.randint(*span_s)
    return series[: int(duration_s)]


def sent(course: Sequence[float], name: str, begin_s: float, rate_per_s: float, seed: int) -> Iterator[Request]:
    """``course`` times ``rate_per_s`` from ``begin_s`` on."""
    arrivals = RateSeries(1.0, tuple(level * rate_per_s for level in course))
    stream = generate(arrivals, Capped(), seed=seed, duration_s=len(course), models=[name])
    return (request for request in stream if request.arrival_s >= begin_s)


def figure_10(seed: int, models: Sequence[str] = FIGURE_10, duration_s: float = 1800.0) -> World:
    rng = random.Random(seed)
    course = levels(rng, duration_s, (120, 180), lambda: rng.uniform(0.075, 0.25))
    placed, at_s = [], 0.0
    for i in range(8):
        placed.append((models[i % len(models)], at_s))
        at_s += rng.uniform(120.0, 180.0)
    streams = [
        sent(course, str(i), at_s, replica_rate(model, 1), seed * 100 + i)
        for i, (model, at_s) in enumerate(placed)
        if at_s < duration_s
    ]
    return World(
        seed=seed, duration_s=duration_s, models=tuple(placed), requests=tuple(merge(*streams)),
        service=Service.FCFS, batch=1, startup_s=0.0,
    )  # fmt: skip


def elastic(seed: int, num_gpus: int, duration_s: float = 3600.0) -> World:
    rng = random.Random(seed)
    streams = []
    for i, model in enumerate(FIGURE_10):
        course = levels(rng, duration_s, (300, 480), lambda: rng.uniform(0.0, 2.5) if rng.random() < 0.75 else 0.0)
        course[0] = max(course[0], 0.1)  # a course of nothing is no course
        streams.append(sent(course, str(i), 0.0, replica_rate(model, 16), seed * 100 + i))
    return World(
        seed=seed, duration_s=duration_s, models=tuple((model, 0.0) for model in FIGURE_10),
        requests=tuple(merge(*streams)), service=Service.CONTINUOUS, batch=16, startup_s=30.0,
        num_gpus=num_gpus,
    )  # fmt: skip


class FixedDeployer:
    """tp=2, 16-bit; where is for a policy, or for look-ahead at a price. Replicas have GPUs of their own."""

    name = "fixed"

    def __init__(self, world: World, policy: PlacementPolicy | float) -> None:
        self._batch, self._policy = world.batch, policy

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = self.several(model, snapshot, 1)
        return found if isinstance(found, NotDeployed) else found[0]

    def several(self, model: str, snapshot: ClusterSnapshot, count: int) -> Sequence[Deployed] | NotDeployed:
        estimate = RooflineEstimator(spec(model), A6000).estimate(DeploymentConfig(tp=2), workload(self._batch))
        found = ReplicaPlacer(snapshot, count, self._placer).fit(demand(estimate.memory))
        if isinstance(found, Refusal):
            return NotDeployed(reason=found.reason)
        steps = steps_of(model, self._batch)
        return [Deployed(placement=placement, steps=steps, what="tp=2") for placement in found.placements]

    def another(self, like: Deployed, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        return self(model, snapshot)

    def _placer(self, snapshot: ClusterSnapshot) -> FindsPlaces:
        link = A6000.link_group_size
        if isinstance(self._policy, float):
            return LookAhead(snapshot, gpu_price=self._policy, link_group_size=link)
        return Placer(snapshot, self._policy, link_group_size=link)


def planned(kind: IntentKind, policy: str, *, knows_rates: bool = True) -> Deployer:
    options = PlanOptions(intent=Intent(kind=kind), workload=workload(1), policy=policy)
    models = [  # on every engine the same times, as what is recorded was taken
        replace(
            roofline_model(model, spec(model), A6000, options, "auto"),
            estimator=RooflineEstimator(spec(model), A6000),
        )
        for model in PAPERS
    ]
    return PlannedDeployer(A6000, models, knows_rates=knows_rates)


def run(
    world: World,
    deployer: Deployer,
    cluster_policy: ClusterPolicy | None = None,
    *,
    replicas: int = 1,
    router: Router | None = None,
) -> SimulationResult:
    scenario = Scenario(
        cluster=idle_cluster(A6000, world.num_gpus),
        actions=tuple(
            Deploy(at_s=at_s, name=str(i), model=model, replicas=replicas)
            for i, (model, at_s) in enumerate(world.models)
        ),
        service=world.service,
        startup_s=world.startup_s,
        most_waiting=10**9,
    )
    policies = Policies(
        deployer=deployer,
        cluster_policy=cluster_policy,
        router=router or LeastOutstanding(),
        contention=processor_sharing,  # without the loss that was measured later, as recorded
    )
    return simulate(world.requests, scenario, policies)


def row(experiment: str, policy: str, world: World, result: SimulationResult) -> Row:
    outcomes = result.outcomes
    done = outcomes.completed
    alone_s = np.array(
        [
            steps.prompt_s(int(i)) + steps.run_s(1, int(i) + 1, int(o) - 1)
            for i, o, d in zip(
                outcomes.asked_input_tokens, outcomes.asked_output_tokens, outcomes.deployment, strict=True
            )
            for steps in (steps_of(world.models[d][0], world.batch),)
        ]
    )
    e2e_s = outcomes.e2e_s[done]
    slow = e2e_s / alone_s[done]
    first = {c.name: c.memory_bytes for c in reversed(result.changes) if c.kind is ChangeKind.DEPLOYED}
    held_gib = np.array([first.get(str(i), 0) / 2**30 for i in range(len(world.models))])
    held_s = sum(gpu.held_fraction for gpu in result.gpus) * result.end_s
    steered = (ChangeKind.SCALED, ChangeKind.DRAINING, ChangeKind.MOVING)
    return Row(
        experiment=experiment,
        policy=policy,
        seed=world.seed,
        requests=len(outcomes),
        unserved=int((~done).sum()),
        gpus_used=sum(gpu.peak_bytes > 0 for gpu in result.gpus),
        gpu_hours=held_s / 3600,
        e2e_mean_s=float(np.mean(e2e_s)),
        cost_mean_gib_s=float(np.mean(held_gib[outcomes.deployment[done]] * e2e_s)),
        e2e_p50_s=float(np.percentile(e2e_s, 50)),
        e2e_p95_s=float(np.percentile(e2e_s, 95)),
        e2e_p99_s=float(np.percentile(e2e_s, 99)),
        slowdown_p50=float(np.percentile(slow, 50)),
        slowdown_p95=float(np.percentile(slow, 95)),
        slowdown_p99=float(np.percentile(slow, 99)),
        slo_violation_fraction=1 - int((slow <= SLO_FACTOR).sum()) / len(outcomes),
        refused=len({c.name for c in result.changes if c.kind is ChangeKind.REFUSED}),
        changes=sum(change.kind in steered for change in result.changes),
    )


def moving(gpu_price: float = 0.25) -> Elastic:
    return Elastic(migration=Migration(gpu_price=gpu_price), link_group_size=A6000.link_group_size)


def figure_10_rows(seed: int) -> Iterator[Row]:
    world = figure_10(seed)
    policies: dict[str, PlacementPolicy | float] = {"packing": Packing(), "least-loaded": LeastLoaded()}
    policies |= {f"hybrid L={threshold}": Hybrid(threshold) for threshold in THRESHOLDS}
    policies |= {f"look-ahead {price:g}": price for price in GPU_PRICES}
    for name, policy in policies.items():
        yield row("figure 10", name, world, run(world, FixedDeployer(world, policy)))
    for name in ("packing", "hybrid L=0.5", "least-loaded", "look-ahead 0.25"):
        result = run(world, FixedDeployer(world, policies[name]), moving())
        yield row("figure 10", f"{name}, moving", world, result)


def planner_rows(seed: int, service: Service = Service.FCFS, experiment: str = "planner") -> Iterator[Row]:
    world = replace(figure_10(seed, PAPERS), service=service)
    for kind in (IntentKind.MIN_COST, IntentKind.MIN_LATENCY):
        for policy in ("packing", "hybrid", "least-loaded"):
            for name, deployer in (
                ("", planned(kind, policy)),
                (", by loads alone", planned(kind, policy, knows_rates=False)),
            ):
                yield row(experiment, f"{kind}, {policy}{name}", world, run(world, deployer))


def elastic_rows(seed: int, num_gpus: int) -> Iterator[Row]:
    world = elastic(seed, num_gpus)
    rule, link = Scaling(), A6000.link_group_size
    hybrid, least, price = Hybrid(), LeastLoaded(), 0.25

    def tried(
        policy: str,
        place: PlacementPolicy | float,
        cluster_policy: ClusterPolicy | None,
        replicas: int = 1,
        router: Router | None = None,
    ) -> Row:
        result = run(world, FixedDeployer(world, place), cluster_policy, replicas=replicas, router=router)
        return row(f"elastic {num_gpus}", policy, world, result)

    for replicas in (1, 2, 3):
        yield tried(f"{replicas} each, fixed, least-loaded", least, None, replicas)
    for place, name in ((hybrid, "hybrid"), (least, "least-loaded"), (price, "look-ahead")):
        yield tried(f"scaling, {name}", place, Elastic(scaling=replace(rule, idle_s=None)))
    yield tried("to zero, hybrid", hybrid, Elastic(scaling=rule))
    consolidating = Elastic(scaling=rule, consolidates=True)
    yield tried("to zero, consolidating, hybrid", hybrid, consolidating, router=Busiest())
    moving = replace(consolidating, migration=Migration(), link_group_size=link)
    yield tried("to zero, consolidating, moving, hybrid", hybrid, moving, router=Busiest())
    yield tried("to zero, consolidating, look-ahead", price, consolidating, router=Busiest())


_FULL = "planner, full pipelines"
EXPERIMENTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "figure 10": figure_10_rows,
    "planner": planner_rows,
    _FULL: partial(planner_rows, service=Service.FCFS_PIPELINED, experiment=_FULL),
    "elastic 8": partial(elastic_rows, num_gpus=8),
    "elastic 16": partial(elastic_rows, num_gpus=16),
}
SEEDS_OF = {"figure 10": 40, "planner": 10, _FULL: 10, "elastic 8": 5, "elastic 16": 5}
_SHOWN = (
    ("gpus_used", "GPUs"), ("gpu_hours", "GPU-h"), ("cost_mean_gib_s", "GiB*s"), ("e2e_mean_s", "mean s"),
    ("e2e_p50_s", "p50 s"), ("e2e_p95_s", "p95 s"),
    ("slowdown_p50", "slow50"), ("slowdown_p95", "slow95"), ("slowdown_p99", "slow99"),
    ("slo_violation_fraction", "SLO miss"), ("unserved", "unserved"), ("refused", "refused"),
    ("changes", "changes"),
)  # fmt: skip


def show(rows: Sequence[Row]) -> None:
    """Means over the seeds."""
    by_policy: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for one in rows:
        by_policy[one.experiment, one.policy].append(one)
    print(f"{'':10s} {'':40s}" + "".join(f"{head:>10s}" for _, head in _SHOWN))
    for (experiment, policy), some in by_policy.items():
        means = [float(np.mean([getattr(one, field) for one in some])) for field, _ in _SHOWN]
        print(f"{experiment:10s} {policy:40s}" + "".join(f"{mean:10.4g}" for mean in means))


def _six_digits(row: dict[str, object]) -> dict[str, object]:
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=Path, help="also write the results there, in place of those of the same experiments"
    )
    parser.add_argument("--only", choices=tuple(EXPERIMENTS), action="append")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the forty")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    kept: list[dict[str, object]] = []
    if options.json and options.json.exists():
        ran = tuple(options.only or EXPERIMENTS)
        kept = [one for one in json.loads(read_kept(options.json))["rows"] if one["experiment"] not in ran]
    for name in options.only or EXPERIMENTS:
        for seed in SEEDS[: min(options.seeds, SEEDS_OF[name])]:
            rows += EXPERIMENTS[name](seed)
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    show(rows)
    if options.json:
        found = [*kept, *map(_six_digits, json.loads(to_json(rows)))]
        lines = ",\n".join(json.dumps(one) for one in found)
        write_kept(options.json, f'{{"machine": {json.dumps(machine())}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
