"""Time of a placement on 1,000 GPUs.

Run: ``python -m tests.bench.place [--json FILE]``; of the exact placer, which is for small clusters:
``--policy ilp --gpus 8``.

``fit`` is a whole decision from a snapshot: check, sort, place. ``again`` is one more demand on the same placer.
Each case is timed over several random clusters of nodes with 8 GPUs; the first is warm-up. Times are CPU time
of the process, which has one thread: on a shared machine wall-clock time says more about the neighbours.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fingerprint.codec import to_json
from placement.placer_registry import make_placer
from placement.policies import ILP, POLICIES
from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement
from tests.bench.rank import machine

GIB = 2**30
NUM_GPUS, GPUS_PER_NODE, CLUSTERS, LINK = 1000, 8, 21, 2
DEGREES = ((1, 1), (2, 4), (8, 1), (1, 8), (4, 2), (8, 8))


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    case: str
    policy: str
    placed: int  # of the clusters
    clusters: int
    fit_median_s: float
    fit_p90_s: float
    again_median_s: float
    machine: str


def cluster(rng: random.Random, kind: str, num_gpus: int = NUM_GPUS) -> ClusterSnapshot:
    """``idle``: all free. ``mixed``: free memory and load differ on every GPU."""
    gpus = []
    for index in range(num_gpus):
        mixed = kind == "mixed"
        gpus.append(
            GpuState(
                device_id=f"GPU-{index:04d}",
                node_id=f"node-{index // GPUS_PER_NODE:03d}",
                gpu_index=index % GPUS_PER_NODE,
                total_bytes=48 * GIB,
                free_bytes=rng.randrange(48 * GIB) if mixed else 47 * GIB,
                load_fraction=rng.random() if mixed else 0.0,
            )
        )
    rng.shuffle(gpus)
    return ClusterSnapshot(tuple(gpus))


def model(tp: int, pp: int) -> BlockDemand:
    """80 layers that take 24 GiB of each GPU at any tp and pp."""
    return BlockDemand(
        tp=tp,
        pp=pp,
        num_layers=80,
        layer_bytes=22 * GIB * pp // 80,
        first_stage_bytes=GIB // 2,
        last_stage_bytes=GIB // 2,
        fixed_bytes=GIB,
    )


def measure(kind: str, tp: int, pp: int, policy: str, num_gpus: int) -> BenchResult:
    rng = random.Random(20261121)
    demand = model(tp, pp)
    fit_s, again_s, placed = [], [], 0
    for _ in range(CLUSTERS + 1):
        snapshot = cluster(rng, kind, num_gpus)
        start = time.process_time()
        placer = make_placer(policy, snapshot, threshold=0.5, link_group_size=LINK)
        answer = placer.fit(demand)
        fit_s.append(time.process_time() - start)
        start = time.process_time()
        again = placer.fit(demand)
        again_s.append(time.process_time() - start)
        assert again == answer
        if isinstance(answer, Placement):
            placed += 1
            assert sum(answer.layers_per_stage) == demand.num_layers
    fit_s, again_s = sorted(fit_s[1:]), sorted(again_s[1:])
    return BenchResult(
        case=f"{kind} tp={tp},pp={pp}",
        policy=policy,
        placed=placed,
        clusters=CLUSTERS + 1,
        fit_median_s=statistics.median(fit_s),
        fit_p90_s=fit_s[int(0.9 * len(fit_s))],
        again_median_s=statistics.median(again_s),
        machine=machine(),
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--policy", choices=(*POLICIES, ILP), action="append", help="else all but ilp")
    parser.add_argument("--gpus", type=int, default=NUM_GPUS)
    options = parser.parse_args(arguments)
    results = [
        measure(kind, tp, pp, policy, options.gpus)
        for kind in ("idle", "mixed")
        for tp, pp in DEGREES
        for policy in options.policy or POLICIES
    ]
    print(results[0].machine)
    for r in results:
        print(
            f"{r.case:20s} {r.policy:13s} placed {r.placed:2d}/{r.clusters}: fit {r.fit_median_s * 1e3:5.1f} ms "
            f"(p90 {r.fit_p90_s * 1e3:5.1f}), again {r.again_median_s * 1e3:5.1f} ms"
        )
    if options.json:
        options.json.write_bytes(to_json(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
