"""Loads for each request of a worker in steady state, replayed by the gateway's policy, next to the plan's law.

Run: ``python -m tests.bench.variant_misses [--cases held-out] [--requests N] [--json FILE]``.

The cases were written down before the first result; ``held-out``, of several replicas, after the law *in between*
was found on the ``known`` ones and before it was judged, ``further`` likewise for the law *without a slot*, which
was found on both. One worker keeps four times as many variants loaded as it has slots, as a deploy does. Variants
are drawn by Zipf's law or evenly, arrivals are Poisson, and a request alone takes ``variant_routing.MEAN_S`` on
average with the steps of ``vllm`` there. *Low*: 0.05 requests/s, of which 15 fall in the half-life of a variant's
frequency. *High*: 60% of what a closed loop of 64 clients completes, or ``utilisation``. Loads are those of the
second half of the requests, for each of them: loads ahead of a waiting request count as well. ``replicas``
have the same rate each, by the default policy: where a variant is loaded at one, its requests go there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from fingerprint.estimators.adapter_slots import requests_within
from fingerprint.queueing import ServiceColumns, Variation
from fingerprint.spared_loads import at_rate
from planner.adapter_slots import VariantLoad
from tests.bench.variant_routing import MEAN_S, STEPS
from traces.simulator.variants import VariantArrival, VariantWorkers, replay_variants

_BYTES, _LOAD_S = 1_000_000, 0.12
_LOADED_PER_SLOT, _CLIENTS, _SEED = 4, 64, 0
_LOW_PER_S, _HIGH_SHARE = 0.05, 0.6
_SHORT_S = 1e-6  # of a load, as loads stop nothing here


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Worker and its traffic."""

    slots: int
    variants: int
    skew: float  # of Zipf's law; 0: even
    is_high: bool
    replicas: int = 1
    utilisation: float = _HIGH_SHARE  # of each replica, where the rate is high

    @property
    def places(self) -> int:
        return _LOADED_PER_SLOT * self.slots

    @property
    def workers(self) -> VariantWorkers:
        return VariantWorkers(
            num_workers=self.replicas,
            slots=self.slots,
            max_loaded=self.places,
            max_outstanding=64,
            variant_bytes=_BYTES,
            load_bytes_per_s=_BYTES / _LOAD_S,
            step=STEPS["vllm"],
        )

    def arrivals(self, number: int, rate_per_s: float) -> list[VariantArrival]:
        rng = np.random.default_rng(_SEED)
        at_s = np.cumsum(rng.exponential(1 / rate_per_s, number))
        drawn = rng.choice(self.variants, number, p=VariantLoad(self.variants, self.skew).shares)
        service_s = rng.exponential(MEAN_S, number)
        return [
            VariantArrival(arrived_s=float(at), variant=f"v{one}", service_s=float(service))
            for at, one, service in zip(at_s, drawn, service_s, strict=True)
        ]

    def rate_per_s(self) -> float:
        """Requests per second at all replicas."""
        return self.replicas * (self.utilisation * self.most_per_s() if self.is_high else _LOW_PER_S)

    def most_per_s(self) -> float:
        """Requests per second that one replica completes."""
        alone = replace(self, replicas=1)
        full = replay_variants(alone.arrivals(2_000, 1.0), alone.workers, clients=_CLIENTS)
        return len(full.latency_s) / full.ended_s


CASES = (
    *(
        Case(slots=slots, variants=variants, skew=skew, is_high=is_high)
        for slots in (1, 8, 32)
        for variants in (32, 64, 1_000)
        for skew in (0.0, 0.5, 1.0, 1.5)
        for is_high in (False, True)
    ),
    *(
        Case(slots=8, variants=variants, skew=skew, is_high=is_high, replicas=2)
        for variants in (64, 1_000)
        for skew in (0.0, 1.0, 1.5)
        for is_high in (False, True)
    ),
)


HELD_OUT = tuple(
    Case(slots=slots, variants=variants, skew=skew, is_high=True, replicas=replicas, utilisation=utilisation)
    for slots, variants in ((4, 24), (8, 120), (16, 400))
    for replicas in (2, 3, 4)
    for skew in (0.0, 0.5, 1.0, 1.5)
    for utilisation in (0.1, 0.3, 0.5, 0.8)
)

FURTHER = tuple(
    Case(slots=slots, variants=variants, skew=skew, is_high=True, replicas=replicas, utilisation=utilisation)
    for slots, variants in ((4, 60), (8, 40), (32, 300))
    for replicas in (2, 3, 5)
    for skew in (0.0, 0.8, 1.2)
    for utilisation in (0.2, 0.4, 0.6, 0.75)
)


CASES_OF = {"known": CASES, "held-out": HELD_OUT, "further": FURTHER}


def replayed(case: Case, requests: int) -> tuple[float, float]:
    """Return loads for each request, and the rate."""
    rate_per_s = case.rate_per_s()
    arrivals = case.arrivals(requests, rate_per_s)
    first, whole = (replay_variants(arrivals[:number], case.workers) for number in (requests // 2, requests))
    return (whole.loads - first.loads) / (requests - requests // 2), rate_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Laws:
    """Loads for each request, by laws of several replicas."""

    apart: float  # each replica with the mix of all requests
    in_between: float  # by the utilisation of the closed loop
    without_slot: float  # that of plans
    together: float  # one replica with the places of all
    planned: float  # utilisation by the law of load; 1 and more: not served

    @classmethod
    def of(cls, case: Case, most_per_s: float) -> Laws:
        """Return the laws of a case of which one replica completes ``most_per_s``."""
        load = VariantLoad(case.variants, case.skew)
        apart, together = load.missed(case.places), load.missed(case.replicas * case.places)
        each_per_s = case.utilisation * most_per_s if case.is_high else _LOW_PER_S
        service, rate = _service(case, load, apart, apart - together), np.array([each_per_s])
        share, left = each_per_s / most_per_s, at_rate(service, rate, Variation())
        return cls(
            apart=apart,
            in_between=share * apart + (1 - share) * together,
            without_slot=float(left.prompt_s[0]) / _SHORT_S,
            together=together,
            planned=each_per_s * float(service.slot_s[0]),
        )


def _service(case: Case, load: VariantLoad, missed: float, spared: float) -> ServiceColumns:
    """Return the service of a replica as plans know it, with loads that take hardly any time."""
    most = min(requests_within(load.distinct, case.slots) or _CLIENTS, float(_CLIENTS))
    alone_s = _request_s(1, load.distinct(1))
    slope_s = (_request_s(most, load.distinct(most)) - alone_s) / (most - 1)
    return ServiceColumns(
        most=np.array([most]),
        prompt_s=np.array([missed * _SHORT_S]),
        added_prompt_s=np.array([missed * _SHORT_S]),
        more_tokens=np.ones(1),
        intercepts_s=np.array([[alone_s - slope_s]]),
        slopes_s=np.array([[slope_s]]),
        spared_s=np.array([spared * _SHORT_S]),
    )


def _request_s(requests: float, variants: float) -> float:
    """Return the time of a request among so many."""
    step = STEPS["vllm"]
    more_s = step.per_request_s * (requests - 1) + step.per_variant_s * (variants - 1)
    return MEAN_S * (1 + (more_s + step.per_both_s * (requests * variants - 1)) / step.fixed_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", choices=CASES_OF, default="known")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print("| slots, loaded | variants | Zipf | rate | replicas | requests/s | replayed ", end="")
    print("| law | in between | without a slot | together | utilisation |")
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for case in CASES_OF[args.cases]:
        seen, rate_per_s = replayed(case, args.requests)
        laws = Laws.of(case, case.most_per_s())
        rows.append({**asdict(case), "rate_per_s": rate_per_s, "replayed": seen, "law": laws.apart})
        rate = f"{case.utilisation:.0%}" if case.is_high else "low"
        skew = f"{case.skew:g}" if case.skew else "even"
        print(
            f"| {case.slots}, {case.places} | {case.variants:,} | {skew} | {rate} | {case.replicas} | "
            f"{rate_per_s:.3g} | {seen:.1%} | {laws.apart:.1%} | {laws.in_between:.1%} | "
            f"{laws.without_slot:.1%} | {laws.together:.1%} | {laws.planned:.2f} |",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
