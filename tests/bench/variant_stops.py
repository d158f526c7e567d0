"""Policies of variants with loads that stop a worker's steps, in the simulator of the cluster.

Run: ``python -m tests.bench.variant_stops [--seeds N] [--requests N] [--load-s S]``.

Two replicas of 8 slots, 32 loaded adapters and 32 sequences; 40 variants by Zipf's law with exponent 1; Poisson
arrivals at a share of what ``ClosedRoundRobin`` completes of an endless queue; prompts of 256 tokens, answers of
350 on average (geometric). Steps are those of ``variant_routing``, of Llama-3.1-8B on an H200 and vLLM 0.33, one
by one, with what adapters add to each. Nothing is measured on an engine.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fingerprint.estimators.adapter_slots import added_prompt_share, added_step_s
from placement.variant_routing import VARIANT_POLICIES, VariantPolicy, make_variant_policy
from tests.bench.variant_routing import LOADS, SLOTS, ClosedRoundRobin
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.variant_worlds import serve_variants, variants_of
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.result import SimulationResult
from traces.simulator.step_model import Limits

INPUT, OUTPUT, REPLICAS, VARIANTS = 256, 350, 2, 40
LOAD_S = 0.12  # of rank 16
_WARM_UP = 0.1  # of the requests, left out of latencies
_ROW_S = (5.54e-3 - 4.87e-3) / 31
STEPS = linear_steps(
    Limits(max_batch=32, max_context_tokens=16_384, max_batched_tokens=8192),
    step_s=4.87e-3 - _ROW_S,
    sequence_s=_ROW_S,
    prompt_token_s=(10.5e-3 - 4.87e-3) / INPUT,
)


@dataclass(frozen=True, slots=True)
class Case:
    """Traffic and the time of a load."""

    load_s: float
    requests: int
    variants: int = VARIANTS
    replicas: int = REPLICAS

    def arrivals(self, seed: int, rate_per_s: float) -> list[Request]:
        rng = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, self.variants + 1)
        at_s = np.cumsum(rng.exponential(1 / rate_per_s, self.requests))
        drawn = rng.choice(self.variants, self.requests, p=weights / weights.sum())
        lengths = np.minimum(rng.geometric(1 / OUTPUT, self.requests), 16_000)
        return [
            Request(float(at), INPUT, int(length), model=f"v{one}")
            for at, one, length in zip(at_s, drawn, lengths, strict=True)
        ]

    def served(
        self, requests: Sequence[Request], policy: str | VariantPolicy, outstanding_per_slot: int = 1
    ) -> SimulationResult:
        cost = AdapterCost(
            slots=SLOTS,
            max_loaded=4 * SLOTS,
            load_s=self.load_s,
            added_s=functools.partial(added_step_s, 32, slots=SLOTS),
            prompt_share=added_prompt_share(SLOTS),
        )
        return serve_variants(
            requests,
            STEPS,
            cost,
            replicas=self.replicas,
            policy=make_variant_policy(policy) if isinstance(policy, str) else policy,
            outstanding_per_slot=outstanding_per_slot,
        )


@functools.cache
def capacity_per_s(case: Case) -> float:
    """Return the requests per second of ``ClosedRoundRobin`` while many wait."""
    ends_s = np.sort(case.served(case.arrivals(99, 1000.0), ClosedRoundRobin()).outcomes.last_token_s)
    first, last = int(0.1 * len(ends_s)), int(0.9 * len(ends_s))
    return float((last - first) / (ends_s[last] - ends_s[first]))


def cell(case: Case, policy: str, load: float, seeds: int) -> str:
    """Return mean and P95 of E2E latency, P95 of TTFT, and loads: means over the seeds 0, 1, ..."""
    rows = []
    for seed in range(seeds):
        result = case.served(case.arrivals(seed, load * capacity_per_s(case)), policy)
        warm = slice(int(_WARM_UP * case.requests), None)
        e2e_s, ttft_s = result.outcomes.e2e_s[warm], result.outcomes.ttft_s[warm]
        loads = variants_of(result).loads
        rows.append((e2e_s.mean(), np.quantile(e2e_s, 0.95), np.quantile(ttft_s, 0.95), loads))
    mean_s, p95_s, ttft_s, loads = np.mean(rows, axis=0)
    return f"{mean_s:.2f}, {p95_s:.2f} s; {ttft_s:.2f} s; {loads:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--load-s", type=float, default=LOAD_S, help="of one adapter")
    args = parser.parse_args()
    case = Case(args.load_s, args.requests)
    print("| load | " + " | ".join(VARIANT_POLICIES) + " |")
    print("|---" * (1 + len(VARIANT_POLICIES)) + "|")
    for load in LOADS:
        cells = [cell(case, policy, load, args.seeds) for policy in VARIANT_POLICIES]
        print(f"| {load:.0%} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
