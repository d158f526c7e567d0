"""Contest of steps of 8,192, 4,096 and 2,048 tokens at most, on one H200: plans and simulation of both sides.

    python -m tests.bench.step_contest plans.json.gz TRACES
    python -m tests.bench.engine_contest_run turns plans.json.gz OUT --python VLLM_PYTHON
    python -m tests.bench.engine_contest_run table plans.json.gz OUT/contest-*.json.gz

Llama-3.1-8B takes requests of Azure's conversation and code traces (their lengths drawn at random; TRACES is the
folder that holds them), half a minute at each of four rates. What is simulated has the times of the recorded
profile on vLLM 0.33.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from tests.bench.accuracy import RESULTS, load
from tests.bench.engine_contest import Contest, Load, PlacedReplica, Plan
from tests.bench.engine_contest_run import _columns
from tests.bench.family_configs import PUBLIC
from tests.bench.kept import read_kept, write_kept
from tests.traces.simulator.test_pipelined import run
from traces.request import Request
from traces.simulator.step_model import Limits, tabulate

MODEL, RECORDING = "meta-llama/Llama-3.1-8B", "h200-vllm-0.33"
STEPS = (8192, 4096, 2048)
LOADS = (("conv", 12.0), ("code", 9.0), ("conv", 17.0), ("code", 13.0))  # Azure's trace, requests a second
SECONDS, MOST_INPUT, MOST_OUTPUT = 30.0, 7000, 1000
GIB = 2**30
ENGINE = DeploymentConfig(engine="vllm")


def limits(step: int) -> Limits:
    return Limits(max_batch=256, max_context_tokens=8192, max_batched_tokens=step, kv_tokens=150_000)


def load_of(trace: Path, rate_per_s: float, seed: int) -> Load:
    """Return Poisson arrivals with lengths of the trace."""
    with gzip.open(trace, "rt") as text:
        rows = [
            (min(MOST_INPUT, int(row["input_tokens"])), min(MOST_OUTPUT, int(row["output_tokens"])))
            for row in csv.DictReader(text)
        ]
    rng, at_s, asked = random.Random(seed), 0.0, list[tuple[float, int, int]]()
    while (at_s := at_s + rng.expovariate(rate_per_s)) < SECONDS:
        input_tokens, output_tokens = rng.choice(rows)
        asked.append((round(at_s, 4), max(1, input_tokens), max(2, output_tokens)))
    at, inputs, outputs = zip(*asked, strict=True)
    return Load(
        rate_per_s=rate_per_s,
        model=(0,) * len(at),
        at_s=at,
        input_tokens=inputs,
        output_tokens=outputs,
        alone_s=(1.0,) * len(at),
    )


def contest(traces: Path) -> Contest:
    (recorded,) = (one for one in load(RESULTS / RECORDING) if one.model == MODEL.partition("/")[2])
    device = recorded.profile.machine.device
    estimator = DepthTiedEstimator(recorded.profile, RooflineEstimator(recorded.profile.spec, device))
    loads = tuple(
        load_of(traces / f"azure_llm_2023_{name}.csv.gz", rate, seed)
        for seed, (name, rate) in enumerate(LOADS, start=1)
    )
    plans, simulated = [], {}
    for step in STEPS:
        name, tables = f"step-{step}", tabulate(estimator, ENGINE, limits(step))
        replica = PlacedReplica(
            deployment="llama", config=ENGINE, devices=(0,), bytes_per_gpu=42 * GIB, limits=limits(step)
        )
        plans.append(Plan(contestant=name, intent="min-latency", knows="none", replicas=(replica,)))
        simulated[name] = tuple(
            _columns(
                one.rate_per_s,
                run(
                    [
                        Request(*request)
                        for request in zip(one.at_s, one.input_tokens, one.output_tokens, strict=True)
                    ],
                    tables,
                    (recorded.profile.spec.num_layers,),
                ).outcomes,
            )
            for one in loads
        )
    return Contest(
        world=f"one {device.name}, {MODEL}, lengths of Azure's conversations and code",
        changes=(),
        slo_multiple=5.0,
        total_bytes=device.memory_bytes,
        models=(("llama", json.dumps(json.loads(PUBLIC.read_text())["models"][MODEL]["config"])),),
        loads=loads,
        plans=tuple(plans),
        simulated=simulated,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path)
    parser.add_argument("traces", type=Path, help="folder of azure_llm_2023_*.csv.gz")
    options = parser.parse_args()
    write_kept(options.plans, to_json(contest(options.traces)).decode())
    print(len(from_json(read_kept(options.plans), Contest).plans), "plans")


if __name__ == "__main__":
    main()
