"""Mean E2E latency of a worker whose variants do not all stay loaded: simulated, and by the plan's law of load.

Run: ``python -m tests.bench.variant_load_law [--requests N]``.

The cases were written down before the first result. A Llama of 7B on one H200 by the roofline, vLLM, 1,000
variants by Zipf's law with exponent 1, prompts of 1,150 tokens, answers of 210 on average (geometric), Poisson
arrivals at shares of the rate that the law without loads serves. Both sides have the same times of steps, prompts
and loads, so that their difference is that of the law alone. The second law leaves loads out, as plans did.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product

import numpy as np

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimator
from fingerprint.estimators.adapter_slots import WithAdapterSlots, variant_load_s
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.queueing import ServiceColumns, Variation, requests_at_once, slot_wait
from fingerprint.service_model import service_model
from iserve.simulation.running import adapter_cost
from planner.adapter_slots import VariantLoad
from tests.fingerprint.step_timed_machine import llama_7b
from tests.traces.simulator.variant_worlds import serve_variants, variants_of
from traces.request import Request
from traces.simulator.step_model import Limits, tabulate

SPEC, GPU, LOAD = llama_7b(), gpu_spec("h200-sxm"), VariantLoad(1_000, 1.0)
INPUT, OUTPUT, BATCH = 1_150, 210, 64
PLAIN = RooflineEstimator(SPEC, GPU)
STEPS = tabulate(
    PLAIN,
    DeploymentConfig(engine="vllm"),
    Limits(max_batch=BATCH, max_context_tokens=4_096, max_batched_tokens=8_192),
)
_WARM_UP = 0.2  # of the requests, left out


@dataclass(frozen=True, slots=True)
class Case:
    """Slots, rank of the adapters, and the rate as a share of what is served without loads."""

    slots: int
    rank: int
    share: float

    @property
    def config(self) -> DeploymentConfig:
        return DeploymentConfig(engine="vllm", adapter_slots=self.slots, adapter_rank=self.rank)

    def columns(self, *, with_loads: bool) -> ServiceColumns:
        missed = LOAD.missed if with_loads else lambda places: 0.0
        estimator: Estimator = WithAdapterSlots(PLAIN, SPEC, LOAD.distinct, 0.0, missed)
        work = Workload(batch=1, input_tokens=INPUT, output_tokens=OUTPUT)
        return ServiceColumns.of([service_model(estimator, self.config, work)], np.array([float(BATCH)]))

    @property
    def rate_per_s(self) -> float:
        return self.share / float(self.columns(with_loads=False).slot_s[0])

    def expected_s(self, *, with_loads: bool) -> float:
        """Return the mean by the law; infinite where the rate is not served."""
        columns, variation = self.columns(with_loads=with_loads), Variation(input_cv=0.0)
        used = self.rate_per_s * columns.slot_s
        if used[0] >= 1:
            return float("inf")
        running = requests_at_once(columns, used, variation)
        waiting_s = slot_wait(columns, used, variation, running.peak).of_all_s
        return float((columns.requests_s(running.mean) + waiting_s)[0])

    def simulated(self, requests: int) -> tuple[float, float]:
        """Return mean seconds, and loads for each request."""
        rng = np.random.default_rng(0)
        at_s = np.cumsum(rng.exponential(1 / self.rate_per_s, requests))
        drawn = rng.choice(LOAD.variants, requests, p=LOAD.shares)
        lengths = np.minimum(rng.geometric(1 / OUTPUT, requests), 2_000)
        asked = [
            Request(float(at), INPUT, int(length), model=f"v{one}")
            for at, one, length in zip(at_s, drawn, lengths, strict=True)
        ]
        cost = adapter_cost(self.config, SPEC, self.rank)
        assert cost is not None
        found = serve_variants(asked, STEPS, cost, outstanding_per_slot=1)
        e2e_s = (found.outcomes.last_token_s - found.outcomes.arrival_s)[int(_WARM_UP * requests) :]
        return float(np.mean(e2e_s)), variants_of(found).loads / requests


CASES = tuple(Case(*one) for one in product((8, 32), (16, 64), (0.2, 0.4, 0.6)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=4_000)
    args = parser.parse_args()
    print("| slots | rank | a load | requests/s | loads a request, law | mean E2E | law | without loads |")
    print("|---:|---:|---:|---:|---|---:|---:|---:|")
    for case in CASES:
        seen_s, loads = case.simulated(args.requests)
        with_s, without_s = (case.expected_s(with_loads=one) for one in (True, False))
        print(
            f"| {case.slots} | {case.rank} | {variant_load_s(SPEC, case.config):.2f} s | {case.rate_per_s:.2f} | "
            f"{loads:.2f}, {LOAD.missed(case.config.loaded_adapters):.2f} | {seen_s:.2f} s | {with_s:.2f} | "
            f"{without_s:.2f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
