"""Values of the sections on a depth-tied profile: charts over the batch, and the driver's readings."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from fingerprint.config import Workload
from fingerprint.estimates import Quantity
from fingerprint.measurements import MeasuredKey, key_of
from iserve.report.accuracy import AccuracyRow
from iserve.report.charts import BatchCurve, batch_chart
from iserve.report.full_model import RunPoint, TimeAt, WholeModel
from iserve.report.latency_fit import TPOT, TTFT
from iserve.report.text import gib
from iserve.report.values import Report

__all__ = ["answer_lengths", "batch_charts", "readings"]

_COLORS = ("s-0", "s-1", "s-2", "s-3", "s-4", "s-5")  # of input lengths, shortest first
_QUANTITIES: tuple[tuple[str, str, Callable[[TimeAt], Quantity]], ...] = (
    (TTFT, "Time to the first token of the whole batch (TTFT)", lambda time: time.ttft_s),
    (TPOT, "Time per output token (TPOT)", lambda time: time.tpot_s),
)
# Of the runs that generated: the driver's own figures
_READINGS: tuple[tuple[str, Callable[[RunPoint], float | None], Callable[[float], str]], ...] = (
    ("SM clock", lambda p: p.readings.sm_clock_mhz, "{:,.0f} MHz".format),
    ("power", lambda p: p.readings.power_w, "{:,.0f} W".format),
    ("memory held", lambda p: p.readings.held_bytes, gib),
)


def batch_charts(report: Report, model: WholeModel, name: str) -> list[tuple[str, Markup, Markup]]:
    """Return each quantity's title and chart, drawn for wide and for narrow pages."""
    found = []
    for quantity, title, of in _QUANTITIES:
        known = [(workload, row.measured) for workload, row in _truths(report, model) if row.quantity == quantity]
        curves = [
            BatchCurve(
                input_tokens=line.input_tokens,
                color=_COLORS[index % len(_COLORS)],
                estimated=tuple((time.batch, of(time)) for time in line.times),
                ran=tuple(p.time.batch for p in model.points if p.time.input_tokens == line.input_tokens),
                truths=tuple((at.batch, value) for at, value in known if at.input_tokens == line.input_tokens),
            )
            for index, line in enumerate(model.lines)
        ]
        said = f"{quantity.removesuffix('_s').upper()} of the whole model over the batch, {name}"
        wide, narrow = (
            batch_chart(curves, name=said, logarithmic=quantity == TTFT, width=width, height=height)
            for width, height in ((520, 330), (340, 280))
        )
        found.append((title, wide, narrow))
    return found


def _truths(report: Report, model: WholeModel) -> list[tuple[Workload, AccuracyRow]]:
    """Return the times measured on the whole model in this configuration, with their workloads."""
    own = MeasuredKey(model.tp, model.pp, model.weights, model.kv, model.expert_parallel)
    return [(at, row) for at, row in report.measured_times if key_of(row.config) == own]


def answer_lengths(report: Report) -> list[int]:
    """Return the output tokens of the times measured on whole models."""
    return sorted({at.output_tokens for model in report.whole for at, _ in _truths(report, model)})


def readings(model: WholeModel) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return the driver's readings that were taken, with each point's figure, and the names of the rest."""
    taken, missing = [], []
    for name, of, words in _READINGS:
        values = [of(point) for point in model.points]
        if all(value is None for value in values):
            missing.append(name)
        else:
            taken.append((name, ["not recorded" if value is None else words(value) for value in values]))
    return taken, missing
