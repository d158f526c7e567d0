"""The section that sets predictions beside what whole models were measured to take."""

from __future__ import annotations

from collections.abc import Sequence

from fingerprint.estimators.linear import Interval
from fingerprint.report import charts
from fingerprint.report.accuracy import AccuracyRecord, AccuracyRow
from fingerprint.report.markup import Child, Markup, el, join
from fingerprint.report.tables import bullets, quantity, table, time_cell
from fingerprint.report.text import gib, label, percent, workload_text
from fingerprint.report.values import Report

__all__ = ["errors"]

_LIMIT = 1.0  # of the drawn errors, relative
_QUANTITIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "memory_bytes_per_gpu": "memory of the fullest GPU",
    "engine_bytes_per_gpu": "of it, counted by the engine",
}


def errors(report: Report) -> Markup:
    """Predicted against measured, when a record of full models was given."""
    record = report.accuracy
    if record is None or not record.rows:
        return el(
            "p",
            "No full model was measured on this machine with these versions. `make accuracy` in the source tree "
            "measures the demo model and another, and this page then shows it; --truth takes a record from "
            "elsewhere. Until then the intervals say how far an estimate may be off.",
        )
    own = [row for row in record.rows if row.shape_hash == report.spec.shape_hash]
    others = [row for row in record.rows if row.shape_hash != report.spec.shape_hash]
    parts: list[Child] = [el("p", _summary(record))]
    for title, rows in (("This model", own), ("Other models, same machine", others)):
        for model in dict.fromkeys(row.model for row in rows):
            parts.append(el("h3", f"{title}: {model}"))
            parts.append(_error_table([row for row in rows if row.model == model]))
    parts.append(bullets(record.notes) if record.notes else None)
    return join(parts)


def _summary(record: AccuracyRecord) -> str:
    told = []
    for name, rows in (
        ("times", [r for r in record.rows if r.is_time]),
        ("memory figures", [r for r in record.rows if not r.is_time]),
    ):
        if rows:
            absolute = sorted(abs(r.relative_error) for r in rows)
            inside = sum(r.inside for r in rows)
            told.append(
                f"{len(rows)} {name}: {inside} inside the predicted 90% interval, median error "
                f"{absolute[len(absolute) // 2]:.1%}, largest {absolute[-1]:.1%}"
            )
    return (
        f"Fingerprints against the whole model, measured on {record.created_at} on {record.machine.cpu_model} "
        f"(load average {record.load_average_before:.2f} before, {record.load_average_after:.2f} after). "
        f"{'; '.join(told)}."
    )


def _relative(row: AccuracyRow) -> Interval:
    """The prediction and its ends over what was measured, less one."""
    ends = (row.predicted.value, row.predicted.low, row.predicted.high)
    value, low, high = (end / row.measured - 1 if row.measured else 0.0 for end in ends)
    return Interval(value, low, high)


def _error_table(rows: Sequence[AccuracyRow]) -> Markup:
    made = []
    for row in rows:
        if row.is_time:
            predicted = quantity(row.predicted)
            measured = time_cell(row.measured, row.measured_low, row.measured_high)
        else:
            within = f"{gib(row.predicted.low)} to {gib(row.predicted.high)}"
            source = el("small", str(row.predicted.source))
            predicted = el("td", gib(row.predicted.value), el("small", within), source, class_="n")
            measured = el("td", gib(row.measured), class_="n")
        verdict = el("span", "inside", class_="good") if row.inside else el("span", "outside", class_="bad")
        error = _relative(row)
        named = f"{label(row.config)}, {row.quantity}: {percent(row.relative_error)}"
        made.append(
            el(
                "tr",
                el("td", label(row.config), el("small", workload_text(row.workload)), class_="l"),
                el("td", _QUANTITIES.get(row.quantity, row.quantity), class_="l short"),
                predicted,
                measured,
                el("td", percent(row.relative_error)),
                el("td", charts.error_bar(error, _LIMIT, named, inside=row.inside)),
                el("td", verdict, el("small", "below resolution") if row.below_resolution else None),
            )
        )
    names = (
        "configuration",
        "quantity",
        "predicted",
        "measured",
        "error",
        f"against measured, ±{_LIMIT:.0%}",
        "90% interval",
    )
    return table(names, made, left=(0, 1))
