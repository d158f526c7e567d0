"""Figures 11 to 13 under load: each intent against each baseline, on the same worlds (``load``, ``contest``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iserve.simulation.baselines import Baseline
from notebooks.figures.choices import SETS
from notebooks.figures.comparison import (
    COST,
    LATENCY,
    OWN,
    Cells,
    Place,
    Scene,
    against_all,
    against_each,
    cells_of,
    changes,
    chart,
    lost,
    spread,
    table,
    times,
)
from notebooks.figures.contest import BASELINES, Contestant, former, iserve
from notebooks.figures.figure import NOT_GIVEN, Figure, Finding
from notebooks.figures.load import PAPER_SITE, SEEDS, trace_source
from planner.intent import IntentKind, Quality

__all__ = ["FACTORS", "LARGE", "SMALL", "figure_11", "figure_12", "figure_13"]

FACTORS = (0.1, 0.2, 0.3, 0.4)
TRACES = ("code", "conv")
# The paper deploys one every five minutes; eight would not be there before its half hour is over.
LARGE, SMALL = (
    Scene(site=PAPER_SITE, models=models, deploy_every_s=every_s)
    for models, every_s in zip(SETS.values(), (300.0, 150.0), strict=True)
)

FASTEST = iserve(IntentKind.MIN_LATENCY)
CHEAPEST = iserve(IntentKind.MIN_COST)
EXACT = iserve(IntentKind.MIN_LATENCY, Quality.EXACT)
NEAR = iserve(IntentKind.MIN_LATENCY, Quality.NEAR)  # the product's default quality
# It is given how many deployments the cluster is to hold, as AlpaServe is, and the rates of those that run.
UNTOLD = replace(FASTEST, name="min-latency, number not given", told_number=False)
NO_RATES = replace(FASTEST, name="min-latency, no rates", knows_rates=False)
FORMER = former(IntentKind.MIN_LATENCY)
OTHERWISE = (EXACT, NEAR, UNTOLD, NO_RATES, FORMER)
RULE_FAST = Contestant(name="rule: max TP, 4 bits", baseline=Baseline.RULE, kind=IntentKind.MIN_LATENCY)
RULE_CHEAP = Contestant(name="rule: min TP, 4 bits", baseline=Baseline.RULE, kind=IntentKind.MIN_COST)
SAVING = (IntentKind.MIN_COST, IntentKind.MIN_MEMORY, IntentKind.MIN_GPU_HOURS)
# No part of the paper's comparison: they tell which of a choice's two halves, configuration or GPUs, decides.
SPREAD = tuple(
    replace(iserve(kind), name=f"{kind}, least-loaded", policy="least-loaded")
    for kind in (IntentKind.MIN_COST, IntentKind.MIN_GPU_HOURS)
)


def _large() -> tuple[Place, ...]:
    return tuple(Place(trace, factor, LARGE) for trace in TRACES for factor in FACTORS)


def _source() -> str:
    return (
        f"simulated, roofline, 8 A6000, no batching, {trace_source()}, means of {len(SEEDS)} seeds; "
        "the paper's engine and formats"
    )


def figure_11(places: Sequence[Place] | None = None) -> Figure:
    """min-latency on the larger models, both traces, four rates."""
    cells = cells_of(places or _large(), (FASTEST, *OTHERWISE, RULE_FAST, *BASELINES))
    ours = FASTEST.name
    p50, throughput = OWN[IntentKind.MIN_LATENCY][1], LATENCY["req/s/GPU"]
    return Figure(
        number="11",
        title="min-latency under load: Llama-2-70B, two Falcon-40B, Llama-2-7B, one every five minutes",
        source=_source(),
        tables=(table("latency of answered requests, from arrival", cells, LATENCY), lost(cells, ours, p50)),
        findings=(
            *_paper_cells(cells),
            Finding(
                "median latency, all baselines, traces, rates",
                "-77.62% on average",
                against_all(cells, ours, p50),
            ),
            *against_each(cells, ours, p50, _PAPER_11),
            Finding(
                "GPU throughput, all baselines, traces, rates",
                "4.72 times on average; 1.03 to 18.49 times at lower loads",
                times([c for who in BASELINES for c in changes(cells, ours, who.name, throughput)]),
            ),
            Finding("min-latency, 16 bits: median latency", NOT_GIVEN, against_all(cells, EXACT.name, p50)),
            Finding(
                "min-latency, 16 bits, against AlpaServe, all",
                NOT_GIVEN,
                spread(changes(cells, EXACT.name, "AlpaServe, all", p50)),
            ),
        ),
        charts=(chart("median latency", "s", cells, (FASTEST, *BASELINES), p50),),
    )


_PAPER_11 = {"AlpaServe": "-31.86% with code at 0.4"}


def _paper_cells(cells: Cells) -> tuple[Finding, ...]:
    """Return what the paper says of single cells."""
    high, lower = Place("code", 0.4, LARGE), Place("code", 0.3, LARGE)
    if (high, FASTEST.name) not in cells or (lower, FASTEST.name) not in cells:
        return ()
    ours, less = cells[high, FASTEST.name], cells[lower, FASTEST.name]
    drops, keeps = cells[high, "AlpaServe"], cells.get((high, "AlpaServe, all"))
    p95 = "no place for all" if keeps is None else f"{keeps.p95_s / ours.p95_s - 1:+.1%}"
    return (
        Finding(
            "code at 0.4: median against AlpaServe",
            "-31.86%; it drops Llama-2-70B",
            f"{ours.p50_s / drops.p50_s - 1:+.1%}; it answers {drops.answered:.0%}: {drops.what}",
        ),
        Finding("code at 0.4: p95 of AlpaServe, all", "+95.96% over iServe", p95),
        Finding("GPUs, code at 0.4 and 0.3", "8 and 4", f"{ours.gpus:.3g} and {less.gpus:.3g}"),
        Finding(
            "GPU throughput, code at 0.4 and 0.3",
            "0.23 and 0.34 (units lost)",
            f"{ours.throughput:.2f} and {less.throughput:.2f} requests/s",
        ),
        Finding("what is deployed, code at 0.4", "(4,1), all", ours.what),
        Finding("what AlpaServe, all deploys there", "(4,1), each twice", "none" if keeps is None else keeps.what),
    )


def figure_12(place: Place | None = None) -> Figure:
    """All intents on eight smaller models, code at 0.4 (the paper's figures 12 and 24)."""
    place = place or Place("code", 0.4, SMALL)
    intents = [
        iserve(kind, quality)
        for kind in (IntentKind.MIN_LATENCY, *SAVING)
        for quality in (Quality.ANY, Quality.NEAR, Quality.EXACT)
    ]
    cells = cells_of((place,), (*intents, UNTOLD, NO_RATES, FORMER, *SPREAD, RULE_FAST, RULE_CHEAP, *BASELINES))
    p95, alpaserve = LATENCY["p95 s"], cells[place, "AlpaServe"]
    return Figure(
        number="12",
        title="All intents under load: two each of Llama-2-13B, Llama-2-7B, Falcon-40B, GPT-J-6B",
        source=_source(),
        tables=(
            table("latency of answered requests, from arrival", cells, LATENCY),
            table("what requests cost", cells, {k: v for k, v in COST.items() if k not in LATENCY}),
            *(lost(cells, str(kind), of) for kind, (_, of) in OWN.items()),
        ),
        findings=(
            Finding("min-latency: p95", "-63.55 to -99.96%", against_all(cells, FASTEST.name, p95)),
            *against_each(cells, FASTEST.name, p95, {}),
            Finding(
                "AlpaServe's degrees, and its p95 against max TP",
                "(2,4), all; worse",
                f"{alpaserve.what}; {p95(alpaserve) / p95(cells[place, 'max TP']) - 1:+.1%}",
            ),
            Finding(
                "GPU throughput of AlpaServe over iServe's",
                "comparable",
                f"{alpaserve.throughput / cells[place, FASTEST.name].throughput:.2f} times",
            ),
        ),
        charts=(chart("p95 latency", "s", cells, (FASTEST, *BASELINES), p95),),
    )


def figure_13(places: Sequence[Place] | None = None) -> Figure:
    """min-cost, min-memory, min-gpu-hours on the larger models (the paper's figures 13 and 21 to 23)."""
    intents = [iserve(kind, quality) for kind in SAVING for quality in (Quality.ANY, Quality.NEAR, Quality.EXACT)]
    intents += [former(kind) for kind in SAVING]
    cells = cells_of(places or _large(), (*intents, RULE_CHEAP, *BASELINES))
    findings = []
    for kind in SAVING:
        (unit, of), own = OWN[kind], str(kind)
        findings += [
            Finding(f"{own}: {unit}, all baselines, traces, rates", _PAPER_13[kind], against_all(cells, own, of)),
            *against_each(cells, own, of, {}),
            Finding(f"{own}, 16 bits: {unit}", NOT_GIVEN, against_all(cells, f"{own}, 16 bits", of)),
        ]
    return Figure(
        number="13",
        title="min-cost, min-memory and min-gpu-hours under load, the models of figure 11",
        source=_source(),
        tables=(
            table("what requests cost: memory or GPUs of their deployment, times E2E", cells, COST),
            *(lost(cells, str(kind), OWN[kind][1]) for kind in SAVING),
        ),
        findings=tuple(findings),
        charts=(chart("cost of a request", "GiB*s", cells, (CHEAPEST, *BASELINES), COST["GiB*s"], trace="code"),),
    )


_PAPER_13 = {
    IntentKind.MIN_COST: "-86.70% on average",
    IntentKind.MIN_MEMORY: "-75.97% on average; -74.36 to -83.92% in figure 13",
    IntentKind.MIN_GPU_HOURS: "-86.31% on average",
}
