"""Mean E2E latency of a worker with variants, simulated step by step, and by the plan's law of load.

Run: ``python -m tests.bench.variant_load_law [--requests N] [--jobs N] [--json FILE] [--cases NAME ...]``.

The cases were written down before the first result; ``first``, ``more`` before the law knew that variants wait for
a slot, ``deltas-more`` before it knew that requests wait for a load next to the steps, ``replicas`` before a law
of several replicas was judged. A worker on an H200 by the roofline, vLLM, prompts of 1,150 tokens, answers of 210
on average (geometric), Poisson arrivals, at most 64 requests at once. Rates are shares of what the law serves
without loads and with a slot for each variant, or of the loading thread's time. All sides have the same times of
steps, prompts and loads, so that their difference is that of the law alone. *Slots for all* is the law that has a
slot for each variant, as plans had. A queue *grows* where the mean E2E of the last fifth of the requests is above
1.5 times that of the third fifth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.estimates import Estimate, Quantity
from fingerprint.estimators.adapter_slots import WithAdapterSlots, variant_cost, variant_load_s
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.estimators.variant_loads import WithVariantLoads
from fingerprint.gpus import gpu_spec
from fingerprint.load_time import RECORDED_TENSORS
from fingerprint.model_spec import ModelSpec
from fingerprint.queueing import ServiceColumns, Variation, requests_at_once, slot_wait
from fingerprint.service_model import ServiceModel, service_model
from fingerprint.spared_loads import at_rate, spared_column
from iserve.simulation.running import adapter_cost
from planner.adapter_slots import VariantLoad
from planner.attainment import Attainment
from planner.costs import figures
from planner.intent import Traffic
from tests.fingerprint.step_timed_machine import llama_7b
from tests.traces.simulator.variant_worlds import BASE, serve_variants, variants_of
from traces.request import Request
from traces.simulator.step_model import Limits, StepModel, tabulate

GPU = gpu_spec("h200-sxm")
INPUT, OUTPUT, BATCH = 1_150, 210, 64
WORK = Workload(batch=1, input_tokens=INPUT, output_tokens=OUTPUT)
PERCENTILES = (50, 95, 99)
_WARM_UP, _GROWS = 0.2, 1.5  # of the requests, left out; of two means


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "7B": llama_7b,
    "20B": partial(llama_7b, 96),
}  # layers as those of the first, three times as many


@lru_cache(maxsize=4)
def steps_of(model: str) -> StepModel:
    limits = Limits(max_batch=BATCH, max_context_tokens=4_096, max_batched_tokens=8_192)
    return tabulate(RooflineEstimator(MODELS[model](), GPU), DeploymentConfig(engine="vllm"), limits)


class _Slower(VariantCost):
    """Cost of variants whose loads take so many times as long."""

    def __init__(self, cost: VariantCost, load_times: float) -> None:
        self._cost, self._load_times = cost, load_times
        self.prompt_share, self.prompt_s = cost.prompt_share, cost.prompt_s

    def step_s(self, rows: float, active: float) -> Quantity:
        return self._cost.step_s(rows, active)

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        return self._cost.prompts_s(workload, ttft_s, base_share, distinct)

    def load_s(self, num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
        return self._load_times * self._cost.load_s(num_bytes, num_tensors)


class _Machine(RooflineEstimator):
    """GPU by its datasheet, on which loads take so many times as long as they are estimated to take."""

    def __init__(self, spec: ModelSpec, load_times: float) -> None:
        super().__init__(spec, GPU)
        self._spec, self._load_times = spec, load_times

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        cost = variant_cost(RooflineEstimator(self._spec, GPU), self._spec, config)
        return None if cost is None else _Slower(cost, self._load_times)


def _exact(estimate: Estimate) -> Estimate:
    """Return ``estimate`` as if it was known to be right."""
    return replace(estimate, ttft_s=_known(estimate.ttft_s), tpot_s=_known(estimate.tpot_s))


def _known(time: Quantity) -> Quantity:
    return replace(time, low=time.value, high=time.value)


@cache
def _spec(model: str) -> ModelSpec:
    return MODELS[model]()


@cache
def _machine(model: str, load_times: float) -> RooflineEstimator:
    spec = _spec(model)
    return RooflineEstimator(spec, GPU) if load_times == 1 else _Machine(spec, load_times)


@cache
def _service(case: Case, with_loads: bool) -> ServiceModel:
    return service_model(case.estimator(with_loads=with_loads), case.config, WORK)


@cache
def _rate_per_s(case: Case) -> float:
    return case._find_rate_per_s()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Worker and its traffic."""

    slots: int
    share: float  # of what is served without loads
    rank: int = 16  # of adapters; 0: variants are int2 deltas
    skew: float = 1.0  # of Zipf's law; 0: even
    variants: int = 1_000
    model: str = "7B"
    thread: float = 0.0  # of the time, loads if each missed request had its own; ``share`` bounds the rate then
    load_times: float = 1.0  # as long as loads are estimated to take
    delta_mib: int = 0  # of deltas in slots with a size, which keep four loaded for each slot
    base_share: float = 0.0  # of the requests, those for the base
    outstanding: int = 1  # requests that the worker is given for each that it runs at once
    replicas: int = 1  # each with that rate

    @property
    def config(self) -> DeploymentConfig:
        deltas = SlotFormat.NONE if self.rank else SlotFormat.INT2
        return DeploymentConfig(
            engine="vllm",
            adapter_slots=self.slots,
            adapter_rank=self.rank,
            delta_format=deltas,
            delta_mib=self.delta_mib,
        )

    @property
    def load(self) -> VariantLoad:
        return VariantLoad(self.variants, self.skew, self.base_share)

    @property
    def spec(self) -> ModelSpec:
        return _spec(self.model)

    @property
    def machine(self) -> RooflineEstimator:
        """The GPU, as both sides know it."""
        return _machine(self.model, self.load_times)

    @property
    def load_s(self) -> float:
        cost = variant_cost(self.machine, self.spec, self.config)
        assert cost is not None
        return variant_load_s(cost, self.spec, self.config)

    @property
    def missed(self) -> float:
        """Share of the requests whose variant is not loaded, if loads take no time."""
        return self.load.missed(self.config.loaded_adapters)

    def estimator(self, *, with_loads: bool) -> WithVariantLoads:
        spec, load = self.spec, self.load
        return WithVariantLoads(
            WithAdapterSlots(self.machine, spec, load.distinct, load.of_base),
            spec,
            load.missed if with_loads else lambda places: 0.0,
            load.load_waits if with_loads else lambda slots, places, load_s: None,
        )

    def columns(self, *, with_loads: bool, slots_for_all: bool, is_shared: bool = False) -> ServiceColumns:
        service = _service(self, with_loads)
        spared_s = spared_column([service.spared_loads_s], [self.replicas if is_shared else 1])
        found = ServiceColumns.of([service], np.array([float(BATCH)]), spared_s)
        return replace(found, most=np.array([float(BATCH)])) if slots_for_all else found

    @property
    def rate_per_s(self) -> float:
        return _rate_per_s(self)

    def _find_rate_per_s(self) -> float:
        most_per_s = self.share / float(self.columns(with_loads=False, slots_for_all=True).slot_s[0])
        return min(most_per_s, self.thread / (self.missed * self.load_s)) if self.thread else most_per_s

    def expected_s(self, *, with_loads: bool = True, slots_for_all: bool = False, is_shared: bool = True) -> float:
        """Return the mean by the law; infinite where the rate is not served.

        Args:
            is_shared: replicas share the variants; else each has the mix of all requests.
        """
        columns = self.columns(with_loads=with_loads, slots_for_all=slots_for_all, is_shared=is_shared)
        variation = Variation(input_cv=0.0)
        columns = at_rate(columns, np.array([self.rate_per_s]), variation)
        used = self.rate_per_s * columns.slot_s
        if used[0] >= 1:
            return float("inf")
        running = requests_at_once(columns, used, variation)
        waiting_s = slot_wait(columns, used, variation, running.peak).of_all_s
        loads_s = 0.0 if columns.loads is None else columns.loads.at(np.array([self.rate_per_s])).of_all_s
        return float((columns.requests_s(running.mean) + waiting_s + loads_s)[0])

    def expected_ttft_s(self) -> tuple[float, ...]:
        """Return the percentiles by the law; infinite where the rate is not served."""
        estimator, service = self.estimator(with_loads=True), _service(self, True)
        alone, full = (_exact(estimator.estimate(self.config, replace(WORK, batch=batch))) for batch in (1, BATCH))
        traffic = Traffic(input_cv=0.0, output_cv=1.0)
        law = Attainment.of_service(service, float(BATCH), figures([full]), alone, traffic, self.replicas)
        return tuple(float(law.quantile("ttft", percentile, self.rate_per_s)[0]) for percentile in PERCENTILES)

    def simulated(self, requests: int) -> Seen:
        """Return what the simulator has of so many requests for each replica."""
        rng = np.random.default_rng(0)
        requests *= self.replicas
        at_s = np.cumsum(rng.exponential(1 / (self.replicas * self.rate_per_s), requests))
        drawn = rng.choice(self.variants, requests, p=self.load.shares / self.load.shares.sum())
        lengths = np.minimum(rng.geometric(1 / OUTPUT, requests), 2_000)
        of_base = rng.random(requests) < self.base_share
        asked = [
            Request(float(at), INPUT, int(length), model=BASE if is_base else f"v{one}")
            for at, one, length, is_base in zip(at_s, drawn, lengths, of_base, strict=True)
        ]
        cost = adapter_cost(self.config, self.spec, self.rank, self.machine)
        assert cost is not None
        found = serve_variants(
            asked, steps_of(self.model), cost, replicas=self.replicas, outstanding_per_slot=self.outstanding
        )
        e2e_s = found.outcomes.last_token_s - found.outcomes.arrival_s
        ttft_s = (found.outcomes.first_token_s - found.outcomes.arrival_s)[int(_WARM_UP * requests) :]
        third, last = (float(np.mean(np.array_split(e2e_s, 5)[part])) for part in (2, 4))
        return Seen(
            e2e_s=float(np.mean(e2e_s[int(_WARM_UP * requests) :])),
            loads=variants_of(found).loads / requests,
            grows=last > _GROWS * third,
            ttft_s=tuple(np.percentile(ttft_s, PERCENTILES).tolist()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Outcome of a case in the simulator."""

    e2e_s: float  # mean
    loads: float  # for each request
    grows: bool
    ttft_s: tuple[float, ...]  # at ``PERCENTILES``


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Case, what the simulator has of it, and the means by the laws; infinite: not served."""

    case: Case
    rate_per_s: float
    load_s: float
    missed: float
    seen: Seen
    law_s: float
    slots_for_all_s: float
    law_ttft_s: tuple[float, ...]  # at ``PERCENTILES``
    apart_s: float  # by the law in which each replica has the mix of all requests

    @property
    def row(self) -> str:
        case, seen = self.case, self.seen
        kind = f"rank {case.rank}" if case.rank else "int2 deltas"
        kind = f"deltas of {case.delta_mib:,} MiB" if case.delta_mib else kind
        law = "even" if not case.skew else f"{case.skew:g}"
        mean = f"{seen.e2e_s:.2f} s" + ", grows" * seen.grows
        percentiles = " | ".join(
            f"{s:.2f}, {law:.2f}" for s, law in zip(seen.ttft_s, self.law_ttft_s, strict=True)
        )
        laws = " | ".join(
            "not served" if np.isinf(s) else f"{s:.2f}" for s in (self.law_s, self.slots_for_all_s, self.apart_s)
        )
        return (
            f"| {case.model} | {kind} | {case.variants:,} | {law} | {case.slots} | {case.share:.0%}, "
            f"{self.rate_per_s:.2f}/s | {seen.loads:.2f}, {self.missed:.2f} | {mean} | {laws} | {percentiles} |"
        )


def as_json(rows: Sequence[Compared]) -> str:
    """Return the rows for a file; null: not served."""
    found = [asdict(row) for row in rows]
    return json.dumps(_finite(found), indent=1) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if value == float("inf") else value


def compared(case: Case, requests: int) -> Compared:
    return Compared(
        case=case,
        rate_per_s=case.rate_per_s,
        load_s=case.load_s,
        missed=case.missed,
        seen=case.simulated(requests),
        law_s=case.expected_s(),
        slots_for_all_s=case.expected_s(slots_for_all=True),
        law_ttft_s=case.expected_ttft_s(),
        apart_s=case.expected_s(is_shared=False),
    )


SHARES = (0.2, 0.4, 0.6)
# Slots, variants; the rate is at most what ``share`` says.
_DELTAS = partial(Case, rank=0, share=0.6, outstanding=2)
CASES = {
    "first": tuple(
        Case(slots=slots, rank=rank, share=share) for slots, rank, share in product((8, 32), (16, 64), SHARES)
    ),
    "more": (
        *(
            Case(slots=slots, skew=skew, share=share, model=model)
            for model, slots, skew, share in product(MODELS, (4, 8, 16), (0.0, 0.5, 1.0, 1.5), SHARES)
        ),
        *(
            Case(slots=slots, skew=skew, share=share, variants=32)
            for slots, skew, share in product((4, 8, 16), (0.0, 1.5), SHARES)
        ),
    ),
    "deltas": tuple(
        Case(slots=slots, skew=skew, share=share, variants=64, rank=0)
        for slots, skew, share in product((8, 16), (0.0, 1.5), SHARES)
    ),
    "deltas-more": (
        *(
            _DELTAS(slots=slots, variants=variants, skew=skew, thread=thread)
            for (slots, variants), skew, thread in product(
                ((4, 32), (12, 32), (8, 128), (32, 128), (16, 256)), (0.0, 1.2), (0.3, 0.7, 1.0, 2.0)
            )
        ),
        *(
            _DELTAS(slots=8, variants=64, skew=skew, thread=thread, load_times=times)
            for times, skew, thread in product((0.2, 4.0), (0.0, 1.2), (0.5, 1.5))
        ),
        *(
            _DELTAS(slots=slots, variants=variants, skew=skew, thread=thread, model="20B")
            for (slots, variants), skew, thread in product(((8, 64), (16, 128)), (0.0, 1.2), (0.5, 0.9, 1.5))
        ),
        *(
            _DELTAS(slots=slots, variants=variants, skew=skew, thread=thread, rank=8, delta_mib=1_700)
            for (slots, variants), skew, thread in product(((4, 64), (8, 200)), (0.0, 1.2), (0.5, 0.9, 1.5))
        ),
        *(
            _DELTAS(slots=8, variants=64, skew=skew, thread=thread, base_share=0.5)
            for skew, thread in product((0.0, 1.2), (0.5, 1.5))
        ),
    ),
    "replicas": (
        *(
            Case(slots=slots, variants=variants, skew=skew, rank=64, share=share, replicas=replicas)
            for replicas, (slots, variants), skew, share in product(
                (2, 4), ((16, 100), (32, 400)), (0.0, 1.0), SHARES
            )
        ),
        *(
            _DELTAS(slots=slots, variants=variants, skew=skew, thread=thread, replicas=replicas)
            for replicas, (slots, variants), skew, thread in product(
                (2, 4), ((8, 48), (16, 160)), (0.0, 1.2), (0.3, 0.7)
            )
        ),
    ),
    "replicas-more": tuple(
        Case(slots=slots, variants=variants, skew=skew, rank=64, share=share, replicas=replicas)
        for replicas, (slots, variants), skew, share in product(
            (2, 3, 6), ((12, 80), (24, 300)), (0.5, 1.2), (0.3, 0.5)
        )
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file of all rows")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=["first"])
    args = parser.parse_args()
    cases = [case for name in args.cases for case in CASES[name]]
    print(
        "| model | variants | number | Zipf | slots | rate | loads, law | mean E2E | law | slots for all | apart",
        end="",
    )
    print("".join(f" | P{percentile} of TTFT, law" for percentile in PERCENTILES) + " |")
    print("|---|---|---:|---|---:|---|---|---:|---:|---:|---:|---|---|---|")
    rows = []
    with ProcessPoolExecutor(args.jobs) as processes:
        for row in processes.map(compared, cases, [args.requests] * len(cases)):
            rows.append(row)
            print(row.row, flush=True)
            if args.json is not None:
                args.json.write_text(as_json(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
