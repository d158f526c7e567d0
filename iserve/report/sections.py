"""Values of the report's sections on times, memory and cost: charts, and what each of them shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from iserve.report.charts import ParetoPoint, memory_bar, pareto_front, time_chart
from iserve.report.latency_fit import TPOT, TTFT, TimePanel
from iserve.report.text import label, number, range_of, seconds
from iserve.report.values import Configuration, RankedRow, Report

__all__ = ["MOST_ROWS", "Burst", "Plane", "bursts", "memory_bars", "plane", "reasons"]

MOST_ROWS = 12  # of an intent's table
_REASONS = 6
_BARS_SHOWN = 16
_VISIBLE = 0.25  # of the longest bar: below it the engine's own bytes get a bar of their own
_QUANTITIES = {TTFT: "Time to the first token (TTFT)", TPOT: "Time per output token (TPOT)"}


@dataclass(frozen=True, slots=True)
class Burst:
    """Charts of one burst: of each quantity its title, and a name and a chart for each (tp, pp)."""

    batch: int
    input_tokens: int
    rows: list[tuple[str, list[tuple[str, Markup]]]]


def bursts(report: Report) -> list[Burst]:
    """Return the charts of every burst that was run, the one nearest the workload first."""
    work, shapes = report.workload, sorted({(p.batch, p.input_tokens) for p in report.panels})
    first = min(shapes, key=lambda s: (abs(s[0] - work.batch), abs(s[1] - work.input_tokens)), default=None)
    return [
        Burst(
            batch,
            tokens,
            [(title, row) for name, title in _QUANTITIES.items() if (row := _charts(report, name, batch, tokens))],
        )
        for batch, tokens in sorted(shapes, key=lambda s: s != first)
    ]


def _charts(report: Report, quantity: str, batch: int, prompt: int) -> list[tuple[str, Markup]]:
    panels = [p for p in report.panels if (p.quantity, p.batch, p.input_tokens) == (quantity, batch, prompt)]
    truths = [
        [
            (str(row.config.weights), row.measured, row.num_layers)
            for at, row in report.measured_times
            if (row.quantity, at.batch, at.input_tokens) == (quantity, batch, prompt)
            and (row.config.tp, row.config.pp) == (panel.tp, panel.pp)
        ]
        for panel in panels
    ]
    most = _top(panels, [value for known in truths for _, value, _ in known])
    return [
        (
            f"{panel.name}, tp={panel.tp} pp={panel.pp}",
            time_chart(panel, num_layers=report.spec.num_layers, most_s=most, truths=known),
        )
        for panel, known in zip(panels, truths, strict=True)
    ]


def _top(panels: Sequence[TimePanel], truths: Sequence[float]) -> float:
    """Return the top of the shared axis: all values, and intervals as far as they leave the values readable."""
    times = [t for p in panels for s in p.series for t in (*s.points, *s.line)]
    values = max([*(t.value_s for t in times), *truths, 1e-9])
    return min(max([values, *(t.high_s for t in times)]), 2 * values) * 1.05


_Bars = list[tuple[Configuration, list[Markup]]]


def memory_bars(report: Report) -> tuple[_Bars, _Bars, bool]:
    """Return bars of the configurations shown first, of the rest, and whether the first have a thin one each."""
    predicted = [found for found in report.configurations if found.estimate is not None]
    shown, has_thin = _bars(predicted[:_BARS_SHOWN])
    return shown, _bars(predicted[_BARS_SHOWN:])[0], has_thin


def _bars(predicted: Sequence[Configuration]) -> tuple[_Bars, bool]:
    """Return bars on one scale; thin ones of the engine's own bytes where the runtime hides these."""
    stages = [(found, stage) for found in predicted if (stage := found.fullest_stage) is not None]
    most = max((stage.total_bytes for _, stage in stages), default=0)
    most_counted = max((stage.total_bytes - stage.runtime_bytes for _, stage in stages), default=0)
    has_thin = most_counted < _VISIBLE * most
    rows = []
    for found, stage in stages:
        bars = [memory_bar(stage, most, label(found.config))]
        if has_thin:
            bars.append(memory_bar(stage, most_counted, label(found.config), with_runtime=False))
        rows.append((found, bars))
    return rows, has_thin


@dataclass(frozen=True, slots=True)
class Plane:
    """Configurations that have both a cost and a latency; the front among the feasible ones, cheapest first."""

    points: list[ParetoPoint]
    front: list[Configuration]

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """Return (colour, shape, words)."""
        weights = dict.fromkeys(point.weights for point in self.points)
        return [*((f"c-{w}", "round", f"{w} weights") for w in weights), ("", "cross", "refused")]


def plane(report: Report) -> Plane | None:
    """Return all configurations that have both figures; None without any."""
    drawn = [
        (found, found.cost, found.estimate.e2e_s)
        for found in report.configurations
        if found.estimate is not None and found.cost is not None and found.cost > 0
    ]
    feasible = [(found, (cost, e2e.value)) for found, cost, e2e in drawn if found.feasible]
    front = [feasible[i][0] for i in pareto_front([figures for _, figures in feasible])]
    points = []
    for found, cost, e2e in drawn:
        figures = f"{seconds(e2e.value)} ({range_of(e2e)}, {e2e.source}), {number(cost)} {report.cost_unit}"
        points.append(
            ParetoPoint(
                cost=cost,
                e2e_s=e2e.value,
                e2e_low_s=e2e.low,
                e2e_high_s=e2e.high,
                weights=str(found.config.weights),
                feasible=found.feasible,
                title=f"{label(found.config)}: {figures}{'' if found.feasible else f'; refused: {found.reason}'}",
                number=front.index(found) + 1 if found in front else None,
            )
        )
    return Plane(points, front) if points else None


def reasons(refused: Sequence[RankedRow]) -> list[str]:
    """Return the reasons of refused configurations, the most frequent first."""
    counted = Counter(row.reason or "no reason was given" for row in refused).most_common()
    lines = [f"{count} × {reason}" for reason, count in counted[:_REASONS]]
    left = sum(count for _, count in counted[_REASONS:])
    return [*lines, f"{left} for other reasons; the table of all configurations has each"] if left else lines
