"""Figure 14: SLO attainment from tight to loose SLOs, over the rates, on the worlds of figure 11.

``latency-slo`` is asked in four ways, the latter three decided before their results: for the longest request and
its SLO; for the mean one, by whose SLO all are judged, with room for the longest (``--context``); with the
traffic of its own requests too (``--rate``, ``--traffic-trace``), such that 95% of them keep it; and with
``min-latency`` for those that are refused then.

AlpaServe's runtime refuses a request that would miss its SLO, which the first recordings of this figure left out:
it is in both forms now. So is iServe: by the same rule with exact times, to tell what is the runtime's and what
the placement's, and as its gateway does it (``--reject-late``), by a forecast when a request arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from iserve.simulation.baselines import Baseline
from notebooks.figures.comparison import Place, served
from notebooks.figures.contest import BASELINES, Contestant, Served, iserve
from notebooks.figures.figure import NOT_GIVEN, Cell, Chart, Figure, Finding, Table
from notebooks.figures.load import SEEDS, trace_source
from notebooks.figures.under_load import FACTORS, FASTEST, FORMER, LARGE, RULE_CHEAP, RULE_FAST
from planner.intent import IntentKind, Quality

__all__ = ["MULTIPLES", "figure_14"]

MULTIPLES = (2.5, 5.0, 7.5)
# The paper's intent, and what else iServe offers for an SLO.
SLO_INTENT = iserve(IntentKind.LATENCY_SLO)
EXACT = iserve(IntentKind.LATENCY_SLO, Quality.EXACT)
NEAR = iserve(IntentKind.LATENCY_SLO, Quality.NEAR)
APART = replace(SLO_INTENT, name="latency-slo, longest apart", longest_apart=True)
TOLD = replace(APART, name="latency-slo, rates given", told_demand=True)
TOLD_OR_FASTEST = replace(TOLD, name="the same, else min-latency", refused=IntentKind.MIN_LATENCY)
OURS = (SLO_INTENT, APART, TOLD, TOLD_OR_FASTEST, FASTEST)
ALPASERVE = tuple(who for who in BASELINES if who.baseline in (Baseline.ALPASERVE, Baseline.ALPASERVE_ALL))
REFUSING = tuple(
    replace(who, name=f"{who.name}, refusing late", refuses_late=True) for who in (SLO_INTENT, FASTEST, *ALPASERVE)
)
GATEWAY = tuple(
    replace(who, name=f"{who.name}, its gateway refusing late", refuses_late=True, by_forecast=True)
    for who in (SLO_INTENT, TOLD_OR_FASTEST, FASTEST)
)
WAITING = (*BASELINES, RULE_FAST, RULE_CHEAP)
CONTESTANTS = (*OURS, EXACT, NEAR, FORMER, RULE_FAST, RULE_CHEAP, *BASELINES, *REFUSING, *GATEWAY)
_PAPERS = (ALPASERVE[0], REFUSING[2])

# By multiple, rate factor and contestant; without those that place not all models.
Found = dict[tuple[float, float, str], Served]


def figure_14(factors: Sequence[float] = FACTORS, multiples: Sequence[float] = MULTIPLES) -> Figure:
    """The code trace; every contestant that knows an SLO is given the one it is judged by."""
    found: Found = {}
    for multiple in multiples:
        for factor in factors:
            for who in CONTESTANTS:
                one = served(Place("code", factor, LARGE), who, multiple)
                if one is not None:
                    found[multiple, factor, who.name] = one
    middle = multiples[len(multiples) // 2]
    return Figure(
        number="14",
        title="SLO attainment: Llama-2-70B, two Falcon-40B, Llama-2-7B, code trace",
        source=f"simulated, roofline, 8 A6000, no batching, {trace_source()}, means of {len(SEEDS)} seeds; "
        "SLO: E2E, multiples of the mean request's at minimum parallelism, 16 bits, alone",
        tables=(
            Table(
                "share of all requests that keep their SLO",
                ("SLO", "", *(f"rate {f:g}" for f in factors)),
                tuple(
                    (f"{multiple:g}x", who.name, *(_kept(found, multiple, factor, who) for factor in factors))
                    for multiple in multiples
                    for who in CONTESTANTS
                ),
            ),
            *(_lost(found, ours) for ours in OURS),
        ),
        findings=tuple(_findings(found)),
        charts=(
            Chart(
                f"attainment, SLO of {middle:g} times",
                "share kept",
                tuple(f"rate {factor:g}" for factor in factors),
                tuple(
                    (who.name, tuple(_kept(found, middle, factor, who) for factor in factors))
                    for who in (SLO_INTENT, TOLD, *BASELINES)
                ),
            ),
        ),
    )


def _kept(found: Found, multiple: float, factor: float, who: Contestant) -> float | None:
    one = found.get((multiple, factor, who.name))
    return None if one is None else round(1 - one.missed, 4)


def _cells(found: Found) -> list[tuple[float, float]]:
    return list(dict.fromkeys((multiple, factor) for multiple, factor, _ in found))


def _lost(found: Found, ours: Contestant) -> Table:
    """Return where any contestant that lets requests wait keeps more, AlpaServe that drops models too.

    A row has the one that keeps most, and what was deployed.
    """
    rows: list[tuple[Cell, ...]] = []
    for multiple, factor in _cells(found):
        kept = {
            who.name: _kept(found, multiple, factor, who) or 0.0 for who in CONTESTANTS if not who.refuses_late
        }
        best, own = max(kept, key=lambda name: kept[name]), kept[ours.name]
        if kept[best] > own:
            what = (found[multiple, factor, name].what for name in (ours.name, best))
            rows.append((f"{multiple:g}x", f"{factor:g}", own, best, kept[best], *what))
    columns = ("SLO", "rate", "kept", "the best", "keeps", "deployed (first seed)", "the best's")
    return Table(f"cells where {ours.name} keeps not the most", columns, tuple(rows))


def _findings(found: Found) -> Iterator[Finding]:
    for ours, rival in product((*OURS, *REFUSING[:2], *GATEWAY), (*ALPASERVE, *REFUSING[2:])):
        if not ours.refuses_late or rival.refuses_late:
            paper = "3.03 to 7.09 times as rates grow" if ours is SLO_INTENT and rival in _PAPERS else NOT_GIVEN
            yield Finding(f"{ours.name}: attainment over {rival.name}'s", paper, _ratios(found, ours, rival.name))
    cells = _cells(found)
    for ours in (*OURS, *REFUSING[:2], *GATEWAY):
        for rivals, what in (
            (WAITING, "all baselines"),
            ((*WAITING, *REFUSING[2:]), "all baselines, AlpaServe refusing late too"),
        ):
            best = sum(_is_best(found, *cell, ours, rivals) for cell in cells)
            yield Finding(f"cells where {ours.name} keeps most of {what}", "all", f"{best} of {len(cells)}")


def _ratios(found: Found, ours: Contestant, rival: str) -> str:
    """Over all cells."""
    ratios = [
        (1 - found[multiple, factor, ours.name].missed) / (1 - theirs.missed)
        for (multiple, factor, who), theirs in found.items()
        if who == rival and theirs.missed < 1
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times" if ratios else "no place for all models"


def _is_best(found: Found, multiple: float, factor: float, ours: Contestant, rivals: Sequence[Contestant]) -> bool:
    most = max(_kept(found, multiple, factor, who) or 0.0 for who in rivals)
    return (_kept(found, multiple, factor, ours) or 0.0) >= most
