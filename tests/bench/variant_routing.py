"""Policies of ``placement.variant_routing`` in the simulator: latency and adapter loads on two replicas.

Run: ``python -m tests.bench.variant_routing [--seeds N] [--variants N] [--load-s S] [--requests N]
[--replicas N]``.

Arrivals are Poisson, service times exponential with a mean of ``MEAN_S`` for a request alone, variants drawn by
Zipf's law with exponent 1. Loads are shares of the throughput that round robin reached with an endless queue
while none passed an overdue request (decision 44; since decision 49 it reaches more). The policies replay the
same requests. Nothing is measured on an engine: ``STEPS`` are what a step takes.

``vllm``: Llama-3.1-8B on an H200 and vLLM 0.33, 8 slots. The base's step takes 4.87 ms for one request and 5.54
for 32, a prompt of 256 tokens 10.5 ms (its profile of 2026-11-22); what adapters add is what plans say
(``fingerprint.estimators.adapter_slots``). A further request has its row, and its share of the prompts that are
read meanwhile. ``steep`` is no engine's: a step of 7.4 ms, to which a further request adds a sixth, as with long
prompts or on a CPU, and a further adapter 0.39 ms. Loads stop no steps.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fingerprint.estimators.adapter_slots import added_prompt_share, added_step_s
from placement.variant_routing import VARIANT_POLICIES, RoundRobin, VariantPolicy
from traces.simulator.variants import StepCost, VariantArrival, VariantReplay, VariantWorkers, replay_variants

MEAN_S = 1.9
LOADS = (0.3, 0.6, 0.9)
SLOTS = 8


def _added_s(requests: int, variants: int) -> float:
    return added_step_s(_LAYERS, requests, variants, SLOTS)


_LAYERS, _ALONE_S, _ROW_S, _PROMPT_S = 32, 4.87e-3, (5.54e-3 - 4.87e-3) / 31, 10.5e-3
_STEP_S = _ALONE_S + _added_s(1, 1)  # of one request and one adapter
_BOTH_S = _added_s(2, 2) - _added_s(2, 1) - _added_s(1, 2) + _added_s(1, 1)
_VARIANT_S = _added_s(1, 2) - _added_s(1, 1) - _BOTH_S
_PROMPTS_S = _PROMPT_S * (1 + added_prompt_share(SLOTS)) * _STEP_S / MEAN_S  # in each of a request's steps
_REQUEST_S = _ROW_S + _added_s(2, 1) - _added_s(1, 1) - _BOTH_S + _PROMPTS_S
STEPS = {
    "vllm": StepCost(fixed_s=_STEP_S, per_request_s=_REQUEST_S, per_variant_s=_VARIANT_S, per_both_s=_BOTH_S),
    "steep": StepCost(fixed_s=7.4e-3, per_request_s=1.2e-3, per_variant_s=0.386e-3),
}
_WARM_UP = 0.1  # of the requests, left out of latencies
_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class ClosedRoundRobin(RoundRobin):
    """Round robin before decision 49, by which loads are given: no request passes an overdue one."""

    is_strict: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Case:
    """Traffic and workers."""

    step: str
    variants: int
    load: float = 1.0
    load_s: float = 0.25
    requests: int = 3000
    replicas: int = 2

    @property
    def workers(self) -> VariantWorkers:
        return VariantWorkers(
            num_workers=self.replicas,
            slots=SLOTS,
            max_loaded=32,
            max_outstanding=32,
            variant_bytes=_BYTES,
            load_bytes_per_s=_BYTES / self.load_s,
            step=STEPS[self.step],
        )

    def arrivals(self, seed: int, rate_per_s: float) -> list[VariantArrival]:
        rng = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, self.variants + 1)
        at_s = np.cumsum(rng.exponential(1 / rate_per_s, self.requests))
        drawn = rng.choice(self.variants, self.requests, p=weights / weights.sum())
        service_s = rng.exponential(MEAN_S, self.requests)
        return [
            VariantArrival(arrived_s=float(at), variant=f"v{one}", service_s=float(service))
            for at, one, service in zip(at_s, drawn, service_s, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    mean_s: float
    p95_s: float
    loads: float


@functools.cache
def capacity_per_s(case: Case) -> float:
    """Return the requests per second of ``ClosedRoundRobin`` while many wait (``case.load`` is not used)."""
    arrivals = case.arrivals(seed=99, rate_per_s=4 * case.replicas * 32 / MEAN_S)
    replay = replay_variants(arrivals, case.workers, ClosedRoundRobin())
    ends_s = np.sort([one.arrived_s + took_s for one, took_s in zip(arrivals, replay.latency_s, strict=True)])
    first, last = int(0.1 * len(ends_s)), int(0.9 * len(ends_s))
    return float((last - first) / (ends_s[last] - ends_s[first]))


def replayed(case: Case, policy: VariantPolicy, seed: int) -> VariantReplay:
    full = Case(case.step, case.variants, load_s=case.load_s, replicas=case.replicas)
    return replay_variants(case.arrivals(seed, case.load * capacity_per_s(full)), case.workers, policy)


def outcome(case: Case, make_policy: Callable[[], VariantPolicy], seeds: int) -> Outcome:
    """Return means over the seeds 0, 1, ..."""
    rows = []
    for seed in range(seeds):
        replay = replayed(case, make_policy(), seed)
        latency_s = np.array(replay.latency_s[int(_WARM_UP * case.requests) :])
        rows.append((latency_s.mean(), np.quantile(latency_s, 0.95), replay.loads))
    return Outcome(*(float(value) for value in np.mean(rows, axis=0)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variants", type=int, nargs="+", default=[40, 1])
    parser.add_argument("--load-s", type=float, default=0.25, help="of one adapter")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    print("| step | variants | load | " + " | ".join(VARIANT_POLICIES) + " |")
    print("|---" * (3 + len(VARIANT_POLICIES)) + "|")
    for step in STEPS:
        for variants in args.variants:
            for load in LOADS:
                case = Case(step, variants, load, args.load_s, args.requests, args.replicas)
                cells = [outcome(case, make, args.seeds) for make in VARIANT_POLICIES.values()]
                shown = (f"{one.mean_s:.2f}, {one.p95_s:.2f} s; {one.loads:.0f}" for one in cells)
                print(f"| {step} | {variants} | {load:.0%} | " + " | ".join(shown) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
