"""Requests with variants that keep their SLO: none rejected, admission that knows no loads, and that knows them.

Run: ``python -m tests.bench.variant_rejection [--requests N] [--seeds N] [--jobs N] [--json FILE]``.

The cases were written down before the first result. One simulated worker as in ``variant_load_law``, with at most
64 requests at once; ``--reject-late`` by the forecast of iServe's gateway, which knows the plan's times. Rates are
shares of what the law serves without loads and with a slot for each variant or, of deltas, of the loading thread's
time. Limits: a prompt alone and so many loads for TTFT, that and three times the mean answer alone for E2E.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

from fingerprint.service_model import ServiceModel, service_model
from iserve.simulation.running import adapter_cost
from placement.types import ClusterSnapshot
from planner.intent import Slo
from planner.pending_loads import LoadsAhead
from tests.bench.variant_load_law import BATCH, INPUT, OUTPUT, WORK, Case, steps_of
from tests.traces.simulator.variant_worlds import BASE, WithSlots
from tests.traces.simulator.worlds import cluster
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.admission import SimulatedAdmission
from traces.simulator.scenario import Deploy, Deployed, NotDeployed, Policies, Scenario
from traces.simulator.simulation import simulate
from traces.simulator.step_model import StepModel
from traces.simulator.workers import Server
from traces.summary import kept

ADMISSIONS = ("none", "without loads", "with loads")


class KnowsNoLoads(SimulatedAdmission):
    """Admission as it was: judges by what is before a request at its worker, and learns loads as prompts."""

    def may_start(self, row: int, server: Server, now_s: float, loads: LoadsAhead | None = None) -> bool:
        return super().may_start(row, server, now_s)

    def may_wait(
        self,
        row: int,
        servers: Sequence[Server],
        queue: Iterable[int],
        now_s: float,
        loads: LoadsAhead | None = None,
    ) -> bool:
        return super().may_wait(row, servers, queue, now_s)

    def record_start(self, row: int, server: Server, now_s: float, loads: LoadsAhead | None = None) -> None:
        super().record_start(row, server, now_s)

    def record_loaded(self, row: int, now_s: float) -> None:
        """Learn nothing."""


class _Planned(WithSlots):
    def __init__(self, steps: StepModel, cost: AdapterCost, service: ServiceModel) -> None:
        super().__init__(steps, cost)
        self._service = service

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = super().__call__(model, snapshot)
        return replace(found, forecast_service=self._service) if isinstance(found, Deployed) else found


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Worker, its traffic and its limits."""

    case: Case
    loads: float  # in the limits

    @property
    def service(self) -> ServiceModel:
        return service_model(self.case.estimator(with_loads=True), self.case.config, WORK, largest_batch=BATCH)

    @property
    def slo(self) -> Slo:
        plain = service_model(self.case.estimator(with_loads=False), self.case.config, WORK)
        loads_s = self.loads * self.case.load_s
        return Slo(ttft_s=plain.prompt_s + loads_s, e2e_s=3 * plain.alone_s + loads_s)

    def requests(self, number: int, seed: int) -> list[Request]:
        case, rng = self.case, np.random.default_rng(seed)
        at_s = np.cumsum(rng.exponential(1 / case.rate_per_s, number))
        drawn = rng.choice(case.variants, number, p=case.load.shares / case.load.shares.sum())
        lengths = np.minimum(rng.geometric(1 / OUTPUT, number), 2_000)
        return [
            Request(float(at), INPUT, int(length), model=f"v{one}")
            for at, one, length in zip(at_s, drawn, lengths, strict=True)
        ]

    def shares(self, admission: str, number: int, seed: int) -> tuple[float, float]:
        """Return the share of the requests that keep the limits: of all, and of those that were answered."""
        case, slo, service = self.case, self.slo, self.service
        cost = adapter_cost(case.config, case.spec, case.rank, case.machine)
        assert cost is not None
        before = admission == "without loads"
        scenario = Scenario(
            cluster=cluster(),
            actions=(Deploy(at_s=0.0, name=BASE, model=BASE, variants=True),),
            most_waiting=10**9,
            outstanding_per_slot=1,
            reject_late={} if admission == "none" else {BASE: slo},
            rejects_by_forecast=True,
        )
        deployer = _Planned(steps_of(case.model), cost, replace(service, one_load=None) if before else service)
        with patch(
            "traces.simulator.deployments.SimulatedAdmission", KnowsNoLoads if before else SimulatedAdmission
        ):
            found = simulate(self.requests(number, seed), scenario, Policies(deployer=deployer)).outcomes
        keeps = kept(found, slo)
        return float(keeps.mean()), float(keeps.sum() / max(1, found.completed.sum()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Shares of a case by seed, each of all requests and of the answered, under each of ``ADMISSIONS``."""

    judged: Judged
    rate_per_s: float
    load_s: float
    slo: Slo
    shares: dict[str, list[tuple[float, float]]]

    @property
    def row(self) -> str:
        case = self.judged.case
        kind = f"rank {case.rank}" if case.rank else "int2 deltas"
        rate = case.thread or case.share
        cells = (
            f"{np.mean([of_all for of_all, _ in found]):.1%} ({np.mean([answered for _, answered in found]):.1%})"
            for found in self.shares.values()
        )
        return (
            f"| {case.variants:,} {kind} | {case.slots} | {case.skew:g} | {self.load_s:.2f} s | {rate:.0%}, "
            f"{self.rate_per_s:.2f}/s | {self.judged.loads:g} | {' | '.join(cells)} |"
        )


def judged(one: Judged, number: int, seeds: int) -> Result:
    return Result(
        judged=one,
        rate_per_s=one.case.rate_per_s,
        load_s=one.case.load_s,
        slo=one.slo,
        shares={name: [one.shares(name, number, seed) for seed in range(seeds)] for name in ADMISSIONS},
    )


_DELTAS = partial(Case, rank=0, share=0.9, outstanding=1)
LIMITS = (0.5, 2.0, 6.0)
CASES = tuple(
    Judged(case=case, loads=loads)
    for case, loads in product(
        (
            *(
                Case(slots=slots, rank=rank, skew=1.0, share=share)
                for (slots, rank), share in product(((8, 16), (32, 16), (32, 64)), (0.3, 0.6, 1.2))
            ),
            *(
                _DELTAS(slots=slots, variants=variants, skew=skew, thread=thread)
                for (slots, variants), skew, thread in product(((8, 64), (16, 128)), (0.0, 1.2), (0.5, 1.0, 2.0))
            ),
        ),
        LIMITS,
    )
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file of all rows")
    args = parser.parse_args()
    print(f"| variants | slots | Zipf | a load | rate | loads in the limits | {' | '.join(ADMISSIONS)} |")
    print("|---|---:|---|---:|---|---:|" + "---|" * len(ADMISSIONS))
    rows = []
    with ProcessPoolExecutor(args.jobs) as processes:
        for found in processes.map(judged, CASES, [args.requests] * len(CASES), [args.seeds] * len(CASES)):
            rows.append(found)
            print(found.row, flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
