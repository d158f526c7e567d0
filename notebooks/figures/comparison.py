"""Comparison under load: cells of a place where all meet and a contestant; tables and findings of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median

from notebooks.figures.contest import BASELINES, SLO_FACTOR, Contestant, Served, averaged, serve
from notebooks.figures.figure import NOT_GIVEN, Cell, Chart, Finding, Table
from notebooks.figures.load import SEEDS, Site, World, compressed, world_of
from planner.intent import IntentKind
from traces.request import Request

__all__ = [
    "COST",
    "LATENCY",
    "OWN",
    "Cells",
    "Columns",
    "Of",
    "Place",
    "Scene",
    "against_all",
    "against_each",
    "cells_of",
    "changes",
    "chart",
    "lost",
    "served",
    "spread",
    "table",
    "times",
]

NAMES = tuple(who.name for who in BASELINES)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """Common settings of a comparison's places; one is equal to itself alone.

    ``requests`` of a trace at a rate factor, by a seed.
    """

    site: Site
    models: tuple[str, ...]  # deployed in this order
    deploy_every_s: float
    requests: Callable[[str, float, int], Iterable[Request]] = compressed


@dataclass(frozen=True, slots=True)
class Place:
    """Place where all contestants meet: a trace and its rate factor, in a scene."""

    trace: str
    factor: float
    scene: Scene

    @property
    def name(self) -> str:
        return f"{self.trace} {self.factor:g}"

    def world(self, seed: int) -> World:
        """Return the world, the same for every contestant."""
        scene, requests = self.scene, self.scene.requests(self.trace, self.factor, seed)
        return world_of(scene.site, scene.models, requests, deploy_every_s=scene.deploy_every_s, seed=seed)


@cache
def served(
    place: Place, who: Contestant, slo_factor: float = SLO_FACTOR, seeds: tuple[int, ...] = SEEDS
) -> Served | None:
    """The mean over the seeds; None: no placement of all was found under one of them."""
    found = []
    for seed in seeds:
        one = serve(place.world(seed), who, slo_factor)
        if one is None:
            return None
        found.append(one)
    return averaged(found)


Cells = dict[tuple[Place, str], Served]


def cells_of(places: Iterable[Place], contestants: Sequence[Contestant], seeds: tuple[int, ...] = SEEDS) -> Cells:
    """Return every contestant's results in every place; without those that found no placement."""
    found = {(place, who.name): served(place, who, seeds=seeds) for place in places for who in contestants}
    return {key: one for key, one in found.items() if one is not None}


Of = Callable[[Served], float]
Columns = dict[str, Of]

LATENCY: Columns = {
    "answered": lambda s: s.answered,
    "p50 of all s": lambda s: s.p50_all_s,
    "p50 s": lambda s: s.p50_s,
    "p95 s": lambda s: s.p95_s,
    "p99 s": lambda s: s.p99_s,
    "SLO missed": lambda s: s.missed,
    "GPUs": lambda s: s.gpus,
    "busy": lambda s: s.busy,
    "req/s/GPU": lambda s: s.throughput,
}
COST: Columns = {
    "GiB*s": lambda s: s.cost_gib_s,
    "GiB": lambda s: s.memory_gib,
    "GPU*s": lambda s: s.gpu_s,
    "GPU-h held": lambda s: s.gpu_hours,
    "SLO missed": lambda s: s.missed,
}
OWN: dict[IntentKind, tuple[str, Of]] = {
    IntentKind.MIN_LATENCY: ("p50 s", lambda s: s.p50_s),
    IntentKind.MIN_COST: ("GiB*s", lambda s: s.cost_gib_s),
    IntentKind.MIN_MEMORY: ("GiB", lambda s: s.memory_gib),
    IntentKind.MIN_GPU_HOURS: ("GPU*s", lambda s: s.gpu_s),
}


def _digits(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def table(title: str, cells: Cells, columns: Columns) -> Table:
    """A row for every cell."""
    rows = tuple(
        (place.name, who, *(_digits(of(one)) for of in columns.values())) for (place, who), one in cells.items()
    )
    return Table(title, ("trace, rate factor", "", *columns), rows)


def changes(cells: Cells, ours: str, other: str, of: Of, *, as_many: bool = True) -> list[float]:
    """Our value against the other's, in every place where it answers as many requests as we do, or fewer."""
    found = []
    for (place, who), one in cells.items():
        own = cells[place, ours]
        if who == other and (one.answered >= own.answered - 1e-9) == as_many:
            found.append(of(own) / of(one) - 1)
    return found


def spread(found: Sequence[float]) -> str:
    """Mean and range of changes."""
    if not found:
        return "nowhere"
    return f"{fmean(found):+.1%} ({min(found):+.1%} to {max(found):+.1%}), {len(found)} cells"


def against_all(cells: Cells, ours: str, of: Of) -> str:
    """Against the baselines together, where they answer as many."""
    found = [change for name in NAMES for change in changes(cells, ours, name, of)]
    return f"{spread(found)}; median {median(found):+.1%}" if found else "nowhere"


def against_each(
    cells: Cells, ours: str, of: Of, papers: Mapping[str, str], names: Sequence[str] = NAMES
) -> Iterator[Finding]:
    """Against every baseline, where it answers as many; where not, apart: it has less to do."""
    for name in names:
        yield Finding(
            f"{ours} against {name}", papers.get(name, NOT_GIVEN), spread(changes(cells, ours, name, of))
        )
        fewer = changes(cells, ours, name, of, as_many=False)
        if fewer:
            yield Finding(f"{ours} against {name} where that leaves requests unanswered", NOT_GIVEN, spread(fewer))


def lost(cells: Cells, ours: str, of: Of) -> Table:
    """Return where a contestant that answers as many requests is better in the intent's own metric: the best."""
    rows: list[tuple[Cell, ...]] = []
    for place in dict.fromkeys(place for place, _ in cells):
        own = cells[place, ours]
        rivals = {
            who: one for (where, who), one in cells.items() if where == place and one.answered >= own.answered
        }
        best = min(rivals, key=lambda who: of(rivals[who]))
        if of(rivals[best]) < of(own) * (1 - 1e-9):
            rows.append((place.name, best, f"{of(own) / of(rivals[best]) - 1:+.1%}", rivals[best].what))
    columns = ("trace, rate factor", "the best", f"{ours} is worse by", "it deployed (first seed)")
    return Table(f"cells where {ours} is not the best on its own metric", columns, tuple(rows))


def chart(
    title: str, unit: str, cells: Cells, shown: Sequence[Contestant], of: Of, *, trace: str = "code"
) -> Chart:
    """The places of one trace, a bar for each of ``shown``."""
    places = [p for p in dict.fromkeys(place for place, _ in cells) if p.trace == trace]
    names = [who.name for who in shown]
    return Chart(
        title,
        unit,
        tuple(place.name for place in places),
        tuple(
            (name, tuple(_digits(of(cells[p, name])) if (p, name) in cells else None for p in places))
            for name in names
        ),
    )


def times(found: Sequence[float]) -> str:
    """Mean and range of ratios."""
    return f"{1 + fmean(found):.2f} times ({1 + min(found):.2f} to {1 + max(found):.2f})"
