"""Time of decisions on 1,000 GPUs with 200 models, and of joint plans with pipelines on idle GPUs.

Run: ``python -m tests.bench.decide [--repeats N] [--json FILE]``.

Clusters of 125 nodes with 8 A6000; deployments of one to four replicas at tp 1, 2, 4 or 8 take random places,
batch, and are busy for up to 80% each, so that some GPUs are crowded and some empty. Each decision begins with a
new snapshot: nothing is kept between them but a model's order of configurations (``RankedModel``) and its service
models, which are made once.

Pipelines are options of a model that no GPU holds: Qwen3-32B on 8 and on 32 idle A6000, where nothing else runs.

Every answer is checked. Times are CPU time of the process, which has one thread; the first cluster is warm-up.
With ``--repeats`` each decision is made so often, on a snapshot drawn anew each time, and the least counts: for
shared machines, on which other processes slow one decision in several.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from daemon.engines.registry import capabilities_for
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from fingerprint.service_model import ServiceModel, service_between
from iserve.planning.joint_choice import JointQuestion, joint_choice
from iserve.planning.pipeline import Hardware, PlanOptions, hypothetical_hardware, make_plan
from iserve.planning.ranking_cache import RankedModel
from placement.actions import Move
from placement.consolidation import consolidate
from placement.lookahead import LookAhead
from placement.migration import Migration, best_move
from placement.scaling import Scaling, scale
from placement.types import (
    ClusterSnapshot,
    DeploymentState,
    GpuState,
    Placement,
    ReplicaState,
    StagePlacement,
)
from planner.intent import Intent, IntentKind
from tests.bench.place import model
from tests.bench.rank import machine
from tests.fingerprint.half_measured import HalfMeasured
from tests.fingerprint.step_timed_machine import llama_7b
from tests.iserve.joint_plans import spec_of

GIB = 2**30
GOAL_S = 0.010
NUM_GPUS, PER_NODE, NUM_MODELS, CLUSTERS = 1000, 8, 200, 21
STAGED, IDLE = "Qwen/Qwen3-32B", (8, 32)
A6000 = gpu_spec("a6000")
LINK = A6000.link_group_size
# A request takes 8 s alone, and 32 s in a full batch.
SERVED = service_between(
    DeploymentConfig(engine="vllm"), Workload(16, 512, 128), (0.5, 4.0), (7.5 / 127, 28.0 / 127)
)
LATENCY = Intent(kind=IntentKind.MIN_LATENCY)
OPTIONS = PlanOptions(workload=Workload(1, 512, 128))


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    case: str
    median_s: float
    p90_s: float
    clusters: int
    repeats: int  # of each decision, the least of which counts
    machine: str
    recorded_on: str
    load: float  # average of a minute before


def cluster(rng: random.Random) -> ClusterSnapshot:
    free = [A6000.memory_bytes] * NUM_GPUS
    load = [0.0] * NUM_GPUS
    deployments = []
    for number in range(NUM_MODELS):
        busy, replicas = rng.uniform(0.0, 0.8), []
        for index in range(rng.choice((1, 1, 1, 2, 4))):
            tp, size_bytes = rng.choice((1, 2, 4, 8)), rng.randrange(4 * GIB, 20 * GIB)
            first = rng.randrange(NUM_GPUS // tp) * tp
            gpus = range(first, first + tp)
            if min(free[gpu] for gpu in gpus) < size_bytes:
                continue
            for gpu in gpus:
                free[gpu] -= size_bytes
                load[gpu] = min(1.0, load[gpu] + busy)
            stage = StagePlacement(
                node_id=f"node-{first // PER_NODE:03d}",
                device_ids=tuple(f"GPU-{gpu:04d}" for gpu in gpus),
                first_layer=0,
                num_layers=80,
                bytes_per_gpu=size_bytes,
            )
            replicas.append(
                ReplicaState(
                    replica_id=f"{number}#{index}",
                    placement=Placement((stage,)),
                    ready=True,
                    outstanding=rng.randrange(8),
                    max_batch=16,
                )
            )
        deployments.append(
            DeploymentState(
                name=str(number),
                model=str(number),
                wanted=len(replicas),
                replicas=tuple(replicas),
                moving=False,
                waiting=rng.choice((0, 0, 0, 5)),
                requests_per_s=busy * len(replicas) / 2.0,
                service_s=2.0,
                idle_s=0.0,
                steady_s=1000.0,
                service=SERVED,
            )
        )
    states = [
        GpuState(
            device_id=f"GPU-{gpu:04d}",
            node_id=f"node-{gpu // PER_NODE:03d}",
            gpu_index=gpu % PER_NODE,
            total_bytes=A6000.memory_bytes,
            free_bytes=free[gpu],
            load_fraction=load[gpu],
        )
        for gpu in range(NUM_GPUS)
    ]
    rng.shuffle(states)
    return ClusterSnapshot(tuple(states), tuple(deployments))


def check_fits(placement: Placement, snapshot: ClusterSnapshot) -> None:
    free = {gpu.device_id: gpu.free_bytes for gpu in snapshot.gpus}
    for stage in placement.stages:
        assert all(free[device] >= stage.bytes_per_gpu for device in stage.device_ids)


@dataclass(frozen=True)
class Case:
    """Kind of decision, and how the clusters are drawn that it is made on."""

    decide: Callable[[ClusterSnapshot], object]
    draw: Callable[[random.Random], ClusterSnapshot] = cluster


def cases() -> dict[str, Case]:
    spec, engines = llama_7b(), tuple(capabilities_for("vllm"))
    estimator = RooflineEstimator(spec, A6000)
    by_policy = replace(OPTIONS, policy="hybrid")
    ranked = RankedModel(spec, A6000, estimator, engines, by_policy)
    half = RankedModel(spec, A6000, HalfMeasured(estimator), engines, by_policy)

    def whole_plan(snapshot: ClusterSnapshot) -> object:
        hardware = Hardware(label="", gpu=A6000, snapshot=snapshot)
        best = make_plan(spec, hardware, estimator, engines, by_policy).best
        assert best is not None
        return best.layout

    def choice_of(model: RankedModel) -> Callable[[ClusterSnapshot], object]:
        def place_of(snapshot: ClusterSnapshot) -> object:
            chosen = model.choose(snapshot)
            assert chosen is not None
            return chosen.placement

        return place_of

    found = {f"joint plan, {of}": Case(jointly(spec, options)) for of, options in joint_options().items()}
    found |= {
        "by a policy, whole plan": Case(whole_plan),
        "by a policy, order kept": Case(choice_of(ranked)),
        "by a policy, order kept, half measured": Case(choice_of(half)),
        "look-ahead, tp=2": Case(lambda snapshot: LookAhead(snapshot, link_group_size=LINK).fit(model(2, 1))),
        "look-ahead, tp=8,pp=2": Case(lambda snapshot: LookAhead(snapshot, link_group_size=LINK).fit(model(8, 2))),
        "scaling of all": Case(lambda snapshot: scale(snapshot, Scaling())),
        "consolidation of all": Case(lambda snapshot: consolidate(snapshot, Scaling())),
        "migration, best of all": Case(lambda snapshot: best_move(snapshot, Migration(), link_group_size=LINK)),
    }
    for count in IDLE:
        for of, options in joint_options().items():
            found[f"with pipelines on {count} idle GPUs, {of}"] = Case(
                jointly(spec_of(STAGED), options, with_pipelines=True), idle(count)
            )
    return found


def joint_options() -> dict[str, PlanOptions]:
    latency = replace(OPTIONS, intent=LATENCY, more_requests=True, longer_requests=True)
    replicas = replace(latency, more_replicas=True)
    return {
        "one replica": latency,
        "one replica, min-cost": replace(latency, intent=Intent()),
        "replicas for 2 requests/s": replace(replicas, intent=replace(LATENCY, rate_per_s=2.0)),
        "replicas for 2 requests/s, min-cost": replace(replicas, intent=Intent(rate_per_s=2.0)),
    }


def jointly(
    spec: ModelSpec, options: PlanOptions, *, with_pipelines: bool = False
) -> Callable[[ClusterSnapshot], object]:
    """Return how a joint plan of ``spec`` is made; ``with_pipelines``: some must have been among its options."""
    estimator, services = RooflineEstimator(spec, A6000), dict[DeploymentConfig, ServiceModel]()
    of_each = RankedModel(spec, A6000, estimator, tuple(capabilities_for("vllm")), options)

    def place_of(snapshot: ClusterSnapshot) -> object:
        chosen = joint_choice(
            JointQuestion(
                estimates=of_each.feasible(len(snapshot.gpus)),
                spec=spec,
                hardware=Hardware(label="", gpu=A6000, snapshot=snapshot),
                estimator=estimator,
                options=options,
                services=services,
            )
        )
        assert chosen is not None
        assert any(config.pp > 1 for config in services) is with_pipelines
        return chosen.placements[0]

    return place_of


def idle(count: int) -> Callable[[random.Random], ClusterSnapshot]:
    """Return how ``count`` A6000 of one node are drawn: always the same."""
    return lambda _: hypothetical_hardware(A6000, count).snapshot


def measure(name: str, case: Case, repeats: int = 1) -> BenchResult:
    load = os.getloadavg()[0]
    rng = random.Random(20261121)
    times_s = []
    for _ in range(CLUSTERS + 1):
        drawn, least_s = rng.getstate(), math.inf
        for _ in range(repeats):
            rng.setstate(drawn)
            snapshot = case.draw(rng)
            start_s = time.process_time()
            answer = case.decide(snapshot)
            least_s = min(least_s, time.process_time() - start_s)
            placement = answer.placement if isinstance(answer, Move) else answer
            if isinstance(placement, Placement):
                check_fits(placement, snapshot)
        times_s.append(least_s)
    times_s = sorted(times_s[1:])
    return BenchResult(
        case=name,
        median_s=statistics.median(times_s),
        p90_s=times_s[int(0.9 * len(times_s))],
        clusters=CLUSTERS,
        repeats=repeats,
        machine=machine(),
        recorded_on=datetime.now(UTC).date().isoformat(),
        load=load,
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--repeats", type=int, default=1, help="of each decision, the least of which counts")
    options = parser.parse_args(arguments)
    results = [measure(name, case, options.repeats) for name, case in cases().items()]
    print(f"{results[0].machine}; goal {GOAL_S * 1e3:g} ms")
    for r in results:
        print(f"{r.case:64s} {r.median_s * 1e3:6.1f} ms (p90 {r.p90_s * 1e3:.1f})")
    if options.json:
        options.json.write_bytes(to_json(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
