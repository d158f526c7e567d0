"""Figure 16 under load: its 21 models, deployed one after the other on eight A6000, while requests arrive.

Decided before the first result: table 1's order; one every 50 seconds, so that the last is there after about as
long as the last of figure 12; both Azure traces in the form of the other figures (``load``) at the ends of their
rate factors, each request for one of the 21 by chance, so that all together are asked for as much as the four
models of figure 11; judged by the SLO of figure 11. A request for a model that found no place is unanswered: it
misses its SLO, and is in no latency but the median of all.

AlpaServe's search among 21 models takes minutes for each seed, so that it is of one; where it may drop no model it
finds no placement, as 21 of them in 16 bits are larger than the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from iserve.simulation.baselines import Baseline
from notebooks.figures.comparison import Cells, Columns, Place, Scene, cells_of, chart, table
from notebooks.figures.contest import BASELINES, Contestant, Served, iserve
from notebooks.figures.figure import NOT_GIVEN, Cell, Figure, Finding, Table
from notebooks.figures.fleet import TWENTY_ONE
from notebooks.figures.load import PAPER_SITE, SEED, SEEDS, trace_source
from notebooks.figures.setting import INTENTS
from notebooks.figures.under_load import RULE_CHEAP, RULE_FAST, SPREAD
from planner.intent import IntentKind

__all__ = ["COLUMNS", "SCENE", "figure_16_load"]

FACTORS = (0.1, 0.4)
TRACES = ("code", "conv")
SCENE = Scene(site=PAPER_SITE, models=TWENTY_ONE, deploy_every_s=50.0)

# The paper's way, by one batch and hybrid; with joint plans it was not recorded.
_INTENTS = tuple(replace(iserve(kind), policy="hybrid") for kind in (*INTENTS, IntentKind.LATENCY_SLO))
_PLAIN = tuple(who for who in BASELINES if who.baseline not in (Baseline.ALPASERVE, Baseline.ALPASERVE_ALL))
_ALPASERVE = Contestant(name="AlpaServe, one seed", baseline=Baseline.ALPASERVE)
_BASELINES = (*_PLAIN, _ALPASERVE)
_CONTESTANTS = (*_INTENTS, *SPREAD, RULE_FAST, RULE_CHEAP, *_PLAIN)
COLUMNS: Columns = {
    "deployed": lambda s: float(s.deployed),
    "answered": lambda s: s.answered,
    "SLO kept": lambda s: 1 - s.missed,
    "p50 of all s": lambda s: s.p50_all_s,
    "p50 s": lambda s: s.p50_s,
    "p95 s": lambda s: s.p95_s,
    "req/s/GPU": lambda s: s.throughput,
    "busy": lambda s: s.busy,
    "GiB*s": lambda s: s.cost_gib_s,
    "GiB": lambda s: s.memory_gib,
    "GPU*s": lambda s: s.gpu_s,
}


def figure_16_load(places: Sequence[Place] | None = None) -> Figure:
    """Every intent against every baseline."""
    places = places or [Place(trace, factor, SCENE) for trace in TRACES for factor in FACTORS]
    cells = {}
    for place in places:
        cells |= cells_of([place], _CONTESTANTS) | cells_of([place], [_ALPASERVE], seeds=(SEED,))
    return Figure(
        number="16-load",
        title="21 models on 8 A6000 under load",
        source=f"simulated, roofline, no batching, {trace_source()}, means of {len(SEEDS)} seeds; the paper's "
        "engine and formats; table 1's six in turn, one every 50 s",
        tables=(table("latencies and costs are of answered requests", cells, COLUMNS), _most_kept(cells)),
        findings=tuple(_findings(cells)),
        charts=tuple(
            chart(
                f"SLO kept, {trace}", "share of all requests", cells, (*_INTENTS, *_BASELINES), _kept, trace=trace
            )
            for trace in TRACES
        ),
    )


def _kept(one: Served) -> float:
    return 1 - one.missed


def _most_kept(cells: Cells) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for place in dict.fromkeys(place for place, _ in cells):
        here = {who: one for (where, who), one in cells.items() if where == place}
        among = ([who.name for who in _INTENTS], [who.name for who in _BASELINES], list(here))
        best = [max(names, key=lambda who: _kept(here[who])) for names in among]
        rows.append((place.name, *(f"{who}: {_kept(here[who]):.1%}" for who in best)))
    return Table("who keeps most SLOs", ("trace, rate factor", "intents", "baselines", "all"), tuple(rows))


def _findings(cells: Cells) -> Iterator[Finding]:
    places = list(dict.fromkeys(place for place, _ in cells))
    for who in (*_INTENTS, *_BASELINES):
        counts = [cells[place, who.name].deployed for place in places]
        yield Finding(
            f"{who.name}: deployed of 21", NOT_GIVEN, f"{min(counts):.3g} to {max(counts):.3g}, means of the seeds"
        )
    for who in _INTENTS:
        for rival in _BASELINES:
            ratios = [cells[place, who.name].throughput / cells[place, rival.name].throughput for place in places]
            yield Finding(
                f"{who.name}: requests a second and GPU over {rival.name}",
                f"higher ({NOT_GIVEN})",
                f"{min(ratios):.2f} to {max(ratios):.2f} times",
            )
