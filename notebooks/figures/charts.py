"""A figure's charts as one standalone SVG: grouped bars, drawn with the report's marks; no plotting library."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from iserve.report.svg import Scale, element, line, linear, words
from iserve.report.text import tick_label
from notebooks.figures.figure import Chart, Figure

__all__ = ["svg"]

_COLOURS = ("#3b6fb6", "#d98032", "#4f9d69", "#a05195", "#8a8a8a", "#c2a33b")
_STYLE = (
    "text{font:11px sans-serif;fill:#777}.title{font-weight:600;font-size:12px}"
    ".grid{stroke:#999;stroke-opacity:.3}.axis{stroke:#777}"
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 250, 52, 46, 42
_LOG_FROM = 50.0  # largest over smallest value


def svg(figure: Figure) -> str:
    """All charts of ``figure``, one below the other."""
    height = HEIGHT * len(figure.charts)
    panels = [element("g", _panel(c), transform=f"translate(0 {HEIGHT * i})") for i, c in enumerate(figure.charts)]
    name = f"Figure {figure.number}. {figure.title}"
    return (
        element(
            "svg",
            element("title", name),
            element("style", Markup(_STYLE)),
            *panels,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {height}",
            width=float(WIDTH),
            height=float(height),
            role="img",
        )
        + "\n"
    )


def _panel(chart: Chart) -> Markup:
    y = _scale([value for _, values in chart.series for value in values if value is not None])
    parts: list[Markup] = [words(LEFT, 14, f"{chart.title} ({chart.unit})", "start", "title")]
    for tick in y.ticks(6):
        parts += [
            line(LEFT, y(tick), WIDTH - 8, y(tick), "grid"),
            words(LEFT - 5, y(tick) + 3.5, tick_label(tick), "end"),
        ]
    group = (WIDTH - 8 - LEFT) / len(chart.labels)
    for i, label in enumerate(chart.labels):
        lines = label.split("\n")
        parts += [
            words(LEFT + (i + 0.5) * group, HEIGHT - BOTTOM + 15 + 12 * j, text) for j, text in enumerate(lines)
        ]
    parts += [_bars(chart, index, y, group) for index in range(len(chart.series))]
    parts.append(line(LEFT, y.start, WIDTH - 8, y.start, "axis"))
    return element("g", *parts, _legend([name for name, _ in chart.series]))


def _scale(values: Sequence[float]) -> Scale:
    """From zero, or logarithmic where the values span much."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= _LOG_FROM:
        return Scale(low / 1.5, high * 1.1, HEIGHT - BOTTOM, TOP, logarithmic=True)
    return linear(0, high * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)


def _bars(chart: Chart, index: int, y: Scale, group: float) -> Markup:
    name, values = chart.series[index]
    width = group * 0.8 / len(chart.series)
    bars = []
    for i, value in enumerate(values):
        if value is not None:
            x = LEFT + i * group + group * 0.1 + index * width
            title = element("title", f"{name}: {value:.4g}")
            x, top = round(x, 1), round(y(value), 1)
            bars.append(
                element("rect", title, x=x, y=top, width=round(width * 0.92, 1), height=round(y.start - top, 1))
            )
    return element("g", *bars, fill=_COLOURS[index % 6])


def _legend(names: Sequence[str]) -> Markup:
    parts: list[Markup] = []
    x = float(LEFT)
    for index, name in enumerate(names):
        parts.append(element("rect", x=x, y=24.0, width=10.0, height=10.0, fill=_COLOURS[index % 6]))
        parts.append(words(x + 14, 33, name, "start"))
        x += 30 + 6.2 * len(name)
    return element("g", *parts)
