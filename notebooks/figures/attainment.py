"""Figure 14: SLO attainment from tight to loose SLOs, over the rates, on the worlds of figure 11."""

from __future__ import annotations

from collections.abc import Sequence

from notebooks.figures.comparison import served
from notebooks.figures.contest import BASELINES, Contestant, iserve
from notebooks.figures.figure import NOT_GIVEN, Cell, Chart, Figure, Finding, Table
from notebooks.figures.load import SEEDS, trace_source
from notebooks.figures.under_load import AS_IF_IDLE, FACTORS, FASTEST, LARGE, RULE_CHEAP, RULE_FAST, PaperPlace
from planner.intent import IntentKind, Quality

__all__ = ["MULTIPLES", "figure_14"]

MULTIPLES = (2.5, 5.0, 7.5)
# The paper's intent, and what else iServe offers to who has an SLO.
SLO_INTENT = iserve(IntentKind.LATENCY_SLO)
EXACT = iserve(IntentKind.LATENCY_SLO, Quality.EXACT)
CONTESTANTS = (SLO_INTENT, EXACT, FASTEST, AS_IF_IDLE, RULE_FAST, RULE_CHEAP, *BASELINES)

Attained = dict[tuple[float, float, str], float | None]  # multiple, rate factor, who: share of all requests


def figure_14(factors: Sequence[float] = FACTORS, multiples: Sequence[float] = MULTIPLES) -> Figure:
    """The code trace; every contestant that knows an SLO is given the one it is judged by."""
    found: Attained = {}
    for multiple in multiples:
        for factor in factors:
            for who in CONTESTANTS:
                one = served(PaperPlace("code", factor, LARGE), who, multiple)
                found[multiple, factor, who.name] = None if one is None else round(1 - one.missed, 4)
    rows: list[tuple[Cell, ...]] = [
        (f"{multiple:g}x", who.name, *(found[multiple, factor, who.name] for factor in factors))
        for multiple in multiples
        for who in CONTESTANTS
    ]
    return Figure(
        number="14",
        title="SLO attainment: Llama-2-70B, two Falcon-40B, Llama-2-7B, code trace",
        source=f"simulated, roofline, 8 A6000, no batching, {trace_source()}, means of {len(SEEDS)} seeds; "
        "SLO: E2E, multiples of the mean request's at minimum parallelism, 16 bits, alone",
        tables=(
            Table(
                "share of all requests that keep their SLO",
                ("SLO", "", *(f"rate {f:g}" for f in factors)),
                tuple(rows),
            ),
        ),
        findings=tuple(_findings(found, factors, multiples)),
        charts=(
            Chart(
                f"attainment, SLO of {multiples[len(multiples) // 2]:g} times",
                "share kept",
                tuple(f"rate {factor:g}" for factor in factors),
                tuple(
                    (
                        who.name,
                        tuple(found[multiples[len(multiples) // 2], factor, who.name] for factor in factors),
                    )
                    for who in (SLO_INTENT, *BASELINES)
                ),
            ),
        ),
    )


def _findings(found: Attained, factors: Sequence[float], multiples: Sequence[float]) -> list[Finding]:
    findings = []
    for ours in (SLO_INTENT, FASTEST):
        for rival in ("AlpaServe", "AlpaServe, all"):
            paper = "3.03 to 7.09 times as rates grow" if (ours, rival) == (SLO_INTENT, "AlpaServe") else NOT_GIVEN
            findings.append(Finding(f"{ours.name}: attainment over {rival}'s", paper, _ratios(found, ours, rival)))
    cells = [(m, f) for m in multiples for f in factors]
    for ours in (SLO_INTENT, FASTEST):
        best = sum(_best(found, m, f, ours) for m, f in cells)
        findings.append(
            Finding(f"cells where {ours.name} keeps most of all baselines", "all", f"{best} of {len(cells)}")
        )
    return findings


def _ratios(found: Attained, ours: Contestant, rival: str) -> str:
    """Over all cells."""
    ratios = [
        own / theirs
        for (multiple, factor, who), theirs in found.items()
        if who == rival and theirs and (own := found[multiple, factor, ours.name]) is not None
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times" if ratios else "no place for all models"


def _best(found: Attained, multiple: float, factor: float, ours: Contestant) -> bool:
    rivals = [found[multiple, factor, who.name] or 0.0 for who in (*BASELINES, RULE_FAST, RULE_CHEAP)]
    return (found[multiple, factor, ours.name] or 0.0) >= max(rivals)
