"""Calibration of the planner's probability of missing an SLO by simulation: ``python -m tests.bench.risk``.

Llama-2-7B by the roofline of an A6000 (``[--grid NAME] [--json FILE] [--requests N]``), one deployment. The model
was built while looking at the grid "built"; "independent" shares no load, length or seed with it. ``--table FILE``
prints the table of docs/risk.md from what such a run wrote.

The planner is given what it would be given: the estimates of one request and of the whole batch, rate, burstiness,
and how the lengths vary; the simulator runs the engine's scheduler on step times tabulated from the same
estimator. Estimates have no interval here, so that what differs is the queueing model alone.

Utilisation is of the planner's own capacity, ``slots / E2E(slots)``. Limits are settled beforehand: TTFT of 5
times that of a request alone, E2E of 1.5 times that of the whole batch; "either" is judged by the simulator on
both. Rates that move ("on and off", "drifting"): the planner gets what ``--traffic-trace`` takes from one stream
and judged by another of the same law. With ISERVE_REFERENCE_DATA, Azure's conversation and code traces too, their
times stretched to the utilisation; the planner is given the workload's mean lengths, their variation and the index
of dispersion in bins of 10 s; or ("path") what ``--traffic-trace`` tells it of the trace.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Quantity
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.simulation.running import EngineBatcher, idle_cluster
from planner.attainment import Attainment, Metric
from planner.costs import figures
from planner.intent import Traffic
from tests.bench.kept import read_kept, write_kept
from tests.bench.rank import machine
from tests.bench.simulate import Spread
from tests.fingerprint.step_timed_machine import llama_7b
from traces.arrivals import ArrivalProcess, Drifting, Gamma, OnOff
from traces.generate import generate
from traces.lengths import FixedLengths, LengthModel, LognormalLengths
from traces.outcomes import Outcomes
from traces.reading import open_trace
from traces.request import Request
from traces.simulator.scenario import Deploy, Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits, StepModel, tabulate
from traces.statistics import statistics_of
from traces.traffic import traffic_of


class Grid(NamedTuple):
    """Loads that are compared."""

    slots: tuple[int, ...]
    utilisations: tuple[float, ...]
    cvs: tuple[float, ...]  # of gaps
    length_cvs: tuple[float, ...]
    input_tokens: int
    output_tokens: int
    seed: int


GRIDS = {
    "built": Grid((1, 8, 32), (0.2, 0.4, 0.6, 0.8, 0.9, 0.95), (1.0, 2.0, 4.0), (0.0, 1.0), 512, 128, 7),
    "independent": Grid((2, 16, 48), (0.3, 0.5, 0.7, 0.85), (1.5, 3.0), (0.5, 1.5), 900, 220, 20261121),
}
PERCENTILES = (95.0, 99.0)
STEADY = 0.8  # tables tell loads up to this utilisation apart
TTFT_LIMIT, E2E_LIMIT = 5.0, 1.5
A6000 = gpu_spec("a6000")


class Case(NamedTuple):
    name: str
    slots: int
    utilisation: float
    traffic: Traffic
    work: Workload  # mean lengths


@dataclass(frozen=True, kw_only=True)
class Compared:
    case: str
    slots: int
    utilisation: float
    burstiness: float
    input_cv: float
    output_cv: float
    busy_fraction: float  # simulated
    missed: dict[str, tuple[float, float]]  # of ttft, e2e, either: predicted, simulated share
    seconds: dict[str, tuple[float | None, float]]  # of "ttft p95" and so on: predicted (None: endless), simulated


def varied(grid: Grid, cv: float) -> LengthModel:
    """Lengths of the grid's means and this coefficient of variation, before rounding."""
    if cv == 0:
        return FixedLengths(grid.input_tokens, grid.output_tokens)
    std = float(np.sqrt(np.log1p(cv**2)))
    means = (float(np.log(tokens) - std**2 / 2) for tokens in (grid.input_tokens, grid.output_tokens))
    of_input, of_output = means
    return LognormalLengths(of_input, std, of_output, std, 0.0, 8000, 8000)


@cache
def step_model(slots: int) -> StepModel:
    limits = Limits(max_batch=slots, max_context_tokens=32_768, max_batched_tokens=8192)
    return tabulate(RooflineEstimator(llama_7b(), A6000), DeploymentConfig(), limits)


def prediction(case: Case) -> Attainment:
    estimator = RooflineEstimator(llama_7b(), A6000)
    full, alone = (
        _certain(
            estimator.estimate(
                DeploymentConfig(), Workload(batch, case.work.input_tokens, case.work.output_tokens)
            )
        )
        for batch in (case.slots, 1)
    )
    return Attainment.of_estimates(figures([full]), [alone], case.traffic)


def _certain(estimate: Estimate) -> Estimate:
    """Return the estimate without intervals."""
    ttft, tpot = (Quantity(q.value, q.value, q.value, q.source) for q in (estimate.ttft_s, estimate.tpot_s))
    return replace(estimate, ttft_s=ttft, tpot_s=tpot)


def simulated(case: Case, requests: Iterable[Request]) -> tuple[Outcomes, float]:
    scenario = Scenario(
        cluster=idle_cluster(A6000, 1),
        actions=(Deploy(at_s=0.0, name="0", model="0"),),
        service=Service.CONTINUOUS,
        most_waiting=10**9,
    )
    policies = Policies(deployer=Spread(step_model(case.slots), 1), make_batcher=EngineBatcher)
    result = simulate(requests, scenario, policies)
    return result.outcomes, result.gpus[0].busy_fraction


def limits_of(case: Case, foreseen: Attainment) -> dict[Metric, float]:
    """Return the limits in seconds."""
    lengths = Traffic(input_cv=case.traffic.input_cv, output_cv=case.traffic.output_cv)
    alone = case._replace(slots=1, traffic=lengths)  # bursts meet at any rate
    return {
        "ttft": TTFT_LIMIT * float(prediction(alone).quantile("ttft", 50.0, 1e-9)[0]),
        "e2e": E2E_LIMIT * float(foreseen.service_s[0] * case.slots),
    }


def compare(case: Case, outcomes: Outcomes, busy: float, rate_per_s: float, foreseen: Attainment) -> Compared:
    times = {"ttft": np.asarray(outcomes.ttft_s), "e2e": np.asarray(outcomes.e2e_s)}
    limits = limits_of(case, foreseen)
    missed, seconds = {}, {}
    for metric, limit in limits.items():
        missed[metric] = (
            float(foreseen.misses(metric, limit, rate_per_s)[0]),
            float((times[metric] > limit).mean()),
        )
        for percentile in PERCENTILES:
            told = float(foreseen.quantile(metric, percentile, rate_per_s)[0])
            seconds[f"{metric} p{percentile:g}"] = (
                told if math.isfinite(told) else None,
                float(np.percentile(times[metric], percentile)),
            )
    either = np.logical_or(*(times[metric] > limit for metric, limit in limits.items())).mean()
    missed["either"] = (max(missed[metric][0] for metric in limits), float(either))
    traffic = case.traffic
    return Compared(
        case=case.name, slots=case.slots, utilisation=case.utilisation, burstiness=traffic.burstiness,
        input_cv=traffic.input_cv, output_cv=traffic.output_cv, busy_fraction=busy, missed=missed, seconds=seconds,
    )  # fmt: skip


def generated(grid: Grid, count: int) -> Iterator[Compared]:
    for cv_lengths, slots, cv, utilisation in product(grid.length_cvs, grid.slots, grid.cvs, grid.utilisations):
        traffic = Traffic(burstiness=cv, input_cv=cv_lengths, output_cv=cv_lengths)
        work = Workload(slots, grid.input_tokens, grid.output_tokens)
        case = Case(f"gamma, lengths cv {cv_lengths:g}", slots, utilisation, traffic, work)
        foreseen = prediction(case)
        rate = utilisation / float(foreseen.service_s[0])
        stream = generate(
            Gamma(rate, cv), varied(grid, cv_lengths), seed=grid.seed, num_requests=count, models=["0"]
        )
        yield compare(case, *simulated(case, stream), rate, foreseen)


def moving(grid: Grid, count: int) -> Iterator[Compared]:
    """Busy for 15 s of 60; and a rate that drifts by 60% about its mean, a minute at a time."""
    cv_lengths = grid.length_cvs[0]
    lengths = varied(grid, cv_lengths)
    for law, slots, utilisation in product(("on and off", "drifting"), grid.slots, grid.utilisations):
        work = Workload(slots, grid.input_tokens, grid.output_tokens)
        case = Case(law, slots, utilisation, Traffic(), work)
        rate = utilisation / float(prediction(case).service_s[0])
        arrivals: ArrivalProcess = Drifting(rate, 0.6, 60.0)
        if law == "on and off":
            arrivals = OnOff(rate_per_s=4 * rate, on_s=15.0, off_s=45.0)
        told, judged = (
            list(generate(arrivals, lengths, seed=grid.seed + turn, num_requests=count, models=["0"]))
            for turn in (1, 2)
        )
        case = case._replace(traffic=traffic_of(told))
        yield compare(case, *simulated(case, judged), rate, prediction(case))


def of_azure(grid: Grid, folder: Path) -> Iterator[Compared]:
    for name in ("conv", "code"):
        requests = list(open_trace(folder / f"azure_llm_2023_{name}.csv.gz", None))
        tokens = np.array([(r.input_tokens, r.output_tokens) for r in requests], np.float64)
        means, cvs = tokens.mean(0), tokens.std(0) / tokens.mean(0)
        moving = traffic_of(requests)
        for slots in grid.slots:
            for utilisation in grid.utilisations:
                work = Workload(slots, round(float(means[0])), round(float(means[1])))
                case = Case(f"azure {name}", slots, utilisation, Traffic(), work)
                span_s = requests[-1].arrival_s - requests[0].arrival_s
                rate = utilisation / float(prediction(case).service_s[0])
                stretch = len(requests) / span_s / rate
                slowed = [replace(r, arrival_s=r.arrival_s * stretch, model="0") for r in requests]
                iod = statistics_of(slowed).bins[1].iod or 1.0
                traffic = Traffic(burstiness=float(np.sqrt(iod)), input_cv=float(cvs[0]), output_cv=float(cvs[1]))
                case = case._replace(traffic=traffic)
                outcomes = simulated(case, slowed)
                yield compare(case, *outcomes, rate, prediction(case))
                path = replace(moving, window_s=moving.window_s * stretch)
                case = case._replace(name=f"azure {name}, path", traffic=path)
                yield compare(case, *outcomes, rate, prediction(case))


def told(c: Compared) -> str:
    pairs = "  ".join(f"{name} {100 * a:5.1f}|{100 * b:5.1f}%" for name, (a, b) in c.missed.items())
    times = "  ".join(f"{name} {math.inf if a is None else a:6.2f}|{b:6.2f}" for name, (a, b) in c.seconds.items())
    load = f"slots {c.slots:2d} cv {c.burstiness:3.1f} u {c.utilisation:.2f} (busy {c.busy_fraction:.2f})"
    return f"{c.case:21s} {load}  {pairs}  {times}"


def table(found: Sequence[Compared]) -> Iterator[str]:
    """The table of docs/risk.md: median and worst error, of shares in points, of times as a factor either way."""
    shares, times = list(found[0].missed), list(found[0].seconds)
    head = ["requests", "slots", "utilisation", *(f"{SHORT[m]}, points" for m in shares), *map(_short, times)]
    yield _row(head)
    yield "|" + "---|" * len(head)
    for case, slots in dict.fromkeys((c.case, c.slots) for c in found):
        every = [c for c in found if (c.case, c.slots) == (case, slots)]
        for what, rows in (("all", every), (f"to {STEADY:g}", [c for c in every if c.utilisation <= STEADY])):
            points = [[abs(a - b) * 100 for c in rows for a, b in [c.missed[m]]] for m in shares]
            ratios = [
                [math.inf if a is None else abs(math.log(a / b)) for c in rows for a, b in [c.seconds[t]]]
                for t in times
            ]
            yield _row(
                [
                    *(case, str(slots), what),
                    *(f"{np.median(p):.1f} ({max(p):.0f})" for p in points),
                    *(f"{_factor(float(np.median(r)), 2)} ({_factor(max(r), 1)})" for r in ratios),
                ]
            )


SHORT = {"ttft": "TTFT", "e2e": "E2E", "either": "either"}


def _short(time: str) -> str:
    metric, percentile = time.split()
    return f"{SHORT[metric]} {percentile}"


def _factor(logarithm: float, digits: int) -> str:
    return f"{math.exp(logarithm):.{digits}f}" if math.isfinite(logarithm) else "none"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def kept(path: Path) -> list[Compared]:
    return from_json(read_kept(path), list[Compared], what=str(path))


def _digits(found: Sequence[Compared]) -> list[Compared]:
    """Four, which is more than the runs settle."""

    def few(pairs: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tuple(None if x is None else float(f"{x:.4g}") for x in pair) for name, pair in pairs.items()
        }

    return [
        replace(
            c,
            missed=few(c.missed),
            seconds=few(c.seconds),
            busy_fraction=round(c.busy_fraction, 4),
            **{name: round(getattr(c, name), 4) for name in ("burstiness", "input_cv", "output_cv")},
        )
        for c in found
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", choices=GRIDS, default="built")
    parser.add_argument("--json", type=Path, help="also write the results there, gzipped where it ends in .gz")
    parser.add_argument("--requests", type=int, default=15_000)
    parser.add_argument("--azure", action="store_true", help="the Azure traces alone")
    parser.add_argument("--table", type=Path, help="run nothing: print the table of these results")
    options = parser.parse_args(arguments)
    if options.table:
        print(*table(kept(options.table)), sep="\n")
        return
    print(machine())
    found = []
    data, grid = os.environ.get("ISERVE_REFERENCE_DATA"), GRIDS[options.grid]
    sources = ([] if options.azure else [generated(grid, options.requests), moving(grid, options.requests)]) + (
        [of_azure(grid, Path(data) / "traces")] if data else []
    )
    for source in sources:
        for compared in source:
            found.append(compared)
            print(told(compared), flush=True)
    found = _digits(found)
    print(*table(found), sep="\n")
    if options.json:
        write_kept(options.json, to_json(found).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
