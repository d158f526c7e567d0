"""Time of ranking 10,000 configurations. Run: ``python -m tests.bench.rank [--loads | --spared] [--json FILE]``.

The candidates are made beforehand and ``fits`` answers at once: the time is that of ``planner.rank`` alone. The
answer is checked before the time is taken; the first runs are warm-up and not counted. In the cases of batches
each candidate has 1, 8 or 32 slots and an estimate of one request, as those of a real plan. With ``--loads`` those
cases alone are run, of candidates that all wait for loads of variants next to their steps. With ``--spared`` they
are run of candidates whose prompts have loads, for one replica and for three, which spare one another some. Times
are CPU time of the process, which has one thread: on a shared machine wall-clock time says more about the
neighbours.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, product
from pathlib import Path

import numpy as np

from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.estimates import Estimate, MemoryEstimate, Quantity, Source
from fingerprint.estimators.adapter_slots import ADDED_ERROR, later
from planner.adapter_slots import VariantLoad
from planner.intent import Intent, IntentKind, Quality, Slo, Traffic
from planner.plan import Candidate, Layout
from planner.rank import rank

NUM_CANDIDATES = 10_000
WARM_UP, REPEATS = 3, 25
CASES = {
    "min-cost": Intent(),
    "min-cost, any quality": Intent(quality=Quality.ANY),
    "latency-slo with a rate, some feasible": Intent(
        kind=IntentKind.LATENCY_SLO, slo=Slo(ttft_s=0.9, e2e_s=4.0), rate_per_s=0.2, quality=Quality.ANY
    ),
    "cost-slo, none feasible": Intent(kind=IntentKind.COST_SLO, budget=0.01),
    "latency-slo with a rate, none feasible": Intent(
        kind=IntentKind.LATENCY_SLO, slo=Slo(ttft_s=0.01, tpot_s=0.001), rate_per_s=0.2, quality=Quality.ANY
    ),
    "latency-slo, none feasible for its queue": Intent(
        kind=IntentKind.LATENCY_SLO, slo=Slo(ttft_s=0.9, e2e_s=4.0), rate_per_s=2.0, quality=Quality.ANY
    ),
    "every limit missed by all": Intent(
        slo=Slo(ttft_s=0.01, tpot_s=0.001, e2e_s=0.1), rate_per_s=9.0, quality=Quality.EXACT, budget=0.01
    ),
    "most keep a rate": Intent(slo=Slo(ttft_s=9.0, e2e_s=40.0), rate_per_s=0.05, quality=Quality.ANY),
}
BATCH_CASES = {
    "batches, some feasible": Intent(
        kind=IntentKind.LATENCY_SLO, slo=Slo(ttft_s=2.0, e2e_s=6.0), rate_per_s=1.0, quality=Quality.ANY
    ),
    "batches, bursts, lengths vary": Intent(
        slo=Slo(ttft_s=2.0, e2e_s=9.0),
        rate_per_s=1.0,
        traffic=Traffic(burstiness=2.0, input_cv=1.0, output_cv=1.0),
    ),
    "batches, none feasible": Intent(
        slo=Slo(ttft_s=0.3, tpot_s=0.01, e2e_s=2.0), rate_per_s=9.0, quality=Quality.ANY
    ),
}
SPARED_CASES = {
    f"{case}, {replicas} replica{'s' * (replicas > 1)}": replace(intent, replicas=replicas)
    for case, intent in BATCH_CASES.items()
    for replicas in (1, 3)
}  # of the same rate at each replica: with one there is nothing to spare


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    case: str
    num_candidates: int
    num_feasible: int
    median_s: float
    p90_s: float
    best_s: float
    repeats: int
    machine: str
    recorded_on: str
    load: float  # average of a minute before


@dataclass(frozen=True)
class Anywhere:
    layers_per_stage: tuple[int, ...] = (32,)


def candidates(count: int, seed: int = 20261121) -> list[Candidate]:
    """Distinct configurations with random figures, in random order."""
    rng = random.Random(seed)
    space = product(
        (1, 2, 4, 8), range(1, 9), WeightFormat, KvFormat, Pruning, ("torch", "vllm", "tensorrt-llm", "other")
    )
    found = []
    for tp, pp, weights, kv, pruning, engine in islice(space, count):
        config = DeploymentConfig(tp, pp, weights, kv, pruning, engine)
        found.append(Candidate(config, _estimate(config, rng)))
    rng.shuffle(found)
    return found


def in_batches(found: list[Candidate], seed: int = 20261122) -> list[Candidate]:
    """Return ``found`` as what one request takes, with batches that take up to twice as long."""
    rng = random.Random(seed)
    return [
        c._replace(alone=c.estimate, estimate=_batch(c.estimate, rng.choice((1, 8, 32)), rng.uniform(1, 2)))
        for c in found
        if c.estimate is not None
    ]


def with_loads(found: list[Candidate], seed: int = 20261128) -> list[Candidate]:
    """Return ``found`` with waits for loads of 1.5 s: of 64 variants by Zipf's law, 4, 8 or 16 stay loaded."""
    rng, load = random.Random(seed), VariantLoad(64, 1.0)
    waits = [load.load_waits(places, places, 1.5) for places in (4, 8, 16)]
    return [
        c._replace(alone=replace(c.alone, load_waits=its), estimate=replace(c.estimate, load_waits=its))
        for c in found
        if c.estimate is not None and c.alone is not None
        for its in [rng.choice(waits)]
    ]


def with_spared_loads(found: list[Candidate], seed: int = 20261129) -> list[Candidate]:
    """Return ``found`` with loads of 0.12 s in prompts: of 1,000 variants by Zipf's law, 16 to 64 stay loaded."""
    rng, load, load_s = random.Random(seed), VariantLoad(1_000, 1.0), 0.12
    missed = {places: [load.missed(number * places) for number in (1, 2, 3)] for places in (16, 32, 64)}

    def loaded(one: Estimate, shares: list[float]) -> Estimate:
        loads_s = one.workload.batch * shares[0] * load_s
        return replace(
            one,
            ttft_s=later(one.ttft_s, Quantity(loads_s, 0.0, loads_s * ADDED_ERROR, Source.SCALED)),
            spared_loads_s=tuple((shares[0] - left) * load_s for left in shares),
        )

    return [
        c._replace(alone=loaded(c.alone, shares), estimate=loaded(c.estimate, shares))
        for c in found
        if c.estimate is not None and c.alone is not None
        for shares in [rng.choice(list(missed.values()))]
    ]


def _batch(alone: Estimate, size: int, longer: float) -> Estimate:
    def times(value: Quantity, factor: float) -> Quantity:
        return Quantity(value.value * factor, value.low * factor, value.high * factor, value.source)

    longer = longer if size > 1 else 1.0
    return replace(
        alone,
        workload=Workload(size, alone.workload.input_tokens, alone.workload.output_tokens),
        ttft_s=times(alone.ttft_s, longer * size),
        tpot_s=times(alone.tpot_s, longer),
    )


def _estimate(config: DeploymentConfig, rng: random.Random) -> Estimate:
    memory = MemoryEstimate(
        tp=config.tp,
        pp=config.pp,
        num_layers=32,
        layer_weight_bytes=rng.randrange(2**27, 2**29),
        layer_kv_bytes=2**24,
        first_stage_bytes=2**28,
        last_stage_bytes=2**28,
        activation_bytes=2**28,
        pp_buffer_bytes=2**20,
        runtime_bytes=2**29,
        relative_error=0.05,
        source=Source.ROOFLINE,
    )
    ttft_s, tpot_s = rng.uniform(0.05, 1.0), rng.uniform(0.005, 0.05)
    return Estimate(
        config=config,
        workload=Workload(),
        memory=memory,
        ttft_s=Quantity(ttft_s, 0.9 * ttft_s, 1.1 * ttft_s, Source.ROOFLINE),
        tpot_s=Quantity(tpot_s, 0.9 * tpot_s, 1.1 * tpot_s, Source.ROOFLINE),
    )


def measure(case: str, intent: Intent, found: list[Candidate]) -> BenchResult:
    somewhere = Anywhere()

    def fits(seen: Estimate) -> Layout:
        return somewhere

    plan = rank(found, intent, fits=fits)
    assert len(plan.candidates) == len(found)
    values = [r.objective for r in plan.candidates if r.feasible and r.objective is not None]
    assert values == sorted(values)
    load, times_s = os.getloadavg()[0], []
    for _ in range(WARM_UP + REPEATS):
        start = time.process_time()
        plan = rank(found, intent, fits=fits)
        times_s.append(time.process_time() - start)
        del plan  # its end is not part of ranking
    times_s = sorted(times_s[WARM_UP:])
    return BenchResult(
        case=case,
        num_candidates=len(found),
        num_feasible=len(values),
        median_s=statistics.median(times_s),
        p90_s=times_s[int(0.9 * len(times_s))],
        best_s=times_s[0],
        repeats=REPEATS,
        machine=machine(),
        recorded_on=datetime.now(UTC).date().isoformat(),
        load=load,
    )


def machine() -> str:
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, Python {platform.python_version()}, numpy {np.__version__}, one core"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--loads", action="store_true", help="cases of batches that wait for loads, alone")
    rows.add_argument("--spared", action="store_true", help="cases of batches with loads in prompts, alone")
    options = parser.parse_args(arguments)
    found = candidates(NUM_CANDIDATES)
    batches = in_batches(found)
    if options.spared:
        batches = with_spared_loads(batches)
        results = [measure(case, intent, batches) for case, intent in SPARED_CASES.items()]
    elif options.loads:
        batches = with_loads(batches)
        results = [measure(case, intent, batches) for case, intent in BATCH_CASES.items()]
    else:
        results = [measure(case, intent, found) for case, intent in CASES.items()]
        results += [measure(case, intent, batches) for case, intent in BATCH_CASES.items()]
    print(results[0].machine)
    for r in results:
        print(
            f"{r.case:40s} {r.num_feasible:6d} of {r.num_candidates} feasible: median {r.median_s * 1e3:6.1f} ms, "
            f"p90 {r.p90_s * 1e3:6.1f} ms, best {r.best_s * 1e3:6.1f} ms ({r.repeats} runs)"
        )
    if options.json:
        options.json.write_bytes(to_json(results, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
