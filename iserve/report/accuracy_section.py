"""Section of the page that compares predictions with measurements of whole models."""

from __future__ import annotations

from collections.abc import Sequence

from fingerprint.estimators.linear import Interval
from iserve.report import charts
from iserve.report.accuracy import AccuracyRecord, AccuracyRow
from iserve.report.markup import Child, Markup, el, join
from iserve.report.tables import bullets, fold, quantity, table, time_cell
from iserve.report.text import gib, label, percent, workload_text
from iserve.report.values import Report

__all__ = ["errors"]

_LIMITS = (0.1, 0.2, 0.5, 1.0)  # of the drawn errors, relative; intervals are cut there
_ROWS = 12  # of another model, that are shown at once
_QUANTITIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "memory_bytes_per_gpu": "memory of the fullest GPU",
    "engine_bytes_per_gpu": "of it, counted by the engine",
    "weights_bytes_per_gpu": "weights on the fullest GPU",
    "non_kv_bytes_per_gpu": "memory without the KV cache",
    "kv_blocks": "KV blocks",
}


def errors(report: Report) -> Markup:
    """Compare predicted with measured, when a record of full models was given."""
    record = report.accuracy
    if record is None or not record.rows:
        return el(
            "p",
            "No full model was measured on this machine with these versions. `make accuracy` in the source tree "
            "measures the demo model and another, and this page then shows it; --measurements takes a record from "
            "elsewhere. Until then the intervals say how far an estimate may be off.",
        )
    own = [row for row in record.rows if row.shape_hash == report.spec.shape_hash]
    others = [row for row in record.rows if row.shape_hash != report.spec.shape_hash]
    parts: list[Child] = [el("p", _summary(record))]
    for title, rows in (("This model", own), ("Other models, same machine", others)):
        for model in dict.fromkeys(row.model for row in rows):
            found = [row for row in rows if row.model == model]
            parts.append(el("h3", f"{title}: {model}"))
            parts.append(_one_by_one(found) if len(found) > _ROWS and rows is others else _error_table(found))
    parts.append(bullets(record.notes) if record.notes else None)
    return join(parts)


def _one_by_one(rows: Sequence[AccuracyRow]) -> Markup:
    return fold(f"{_judged(rows)}; open for each", _error_table(rows))


def _summary(record: AccuracyRecord) -> str:
    told = []
    for name, rows in (
        ("times", [r for r in record.rows if r.is_time]),
        ("memory figures", [r for r in record.rows if not r.is_time]),
    ):
        if rows:
            told.append(f"{len(rows)} {name}: {_judged(rows)}")
    machine = record.machine
    where = machine.cpu_model if machine.device.is_cpu else machine.device.name
    before, after = record.load_average_before, record.load_average_after
    load = "" if before is None or after is None else f" (load average {before:.2f} before, {after:.2f} after)"
    return (
        f"Fingerprints against the whole model, measured on {record.created_at} on {where}{load}. "
        f"{'; '.join(told)}."
    )


def _judged(rows: Sequence[AccuracyRow]) -> str:
    absolute = sorted(abs(row.relative_error) for row in rows)
    return (
        f"{sum(row.inside for row in rows)} inside the predicted 90% interval, median error "
        f"{absolute[len(absolute) // 2]:.1%}, largest {absolute[-1]:.1%}"
    )


def _relative(row: AccuracyRow) -> Interval:
    """Return the prediction and its ends over what was measured, less one."""
    ends = (row.predicted.value, row.predicted.low, row.predicted.high)
    value, low, high = (end / row.measured - 1 if row.measured else 0.0 for end in ends)
    return Interval(value, low, high)


def _error_table(rows: Sequence[AccuracyRow]) -> Markup:
    """Return a row each; a configuration that all share is named once, in the head."""
    configs = list(dict.fromkeys(row.config for row in rows))
    largest = max(abs(row.relative_error) for row in rows)
    limit = next((limit for limit in _LIMITS if limit >= largest), _LIMITS[-1])
    made = []
    for row in rows:
        work = "any workload" if row.workload is None else workload_text(row.workload)
        verdict = el("span", "inside", class_="good") if row.inside else el("span", "outside", class_="bad")
        error = _relative(row)
        named = f"{label(row.config)}, {row.quantity}: {percent(row.relative_error)}"
        made.append(
            el(
                "tr",
                el("td", [label(row.config), el("small", work)] if len(configs) > 1 else work, class_="l"),
                el("td", _QUANTITIES.get(row.quantity, row.quantity), class_="l short"),
                _predicted_and_measured(row),
                el("td", percent(row.relative_error)),
                el("td", charts.error_bar(error, limit, named, inside=row.inside)),
                el("td", verdict, el("small", "below resolution") if row.below_resolution else None),
            )
        )
    names = (
        "configuration" if len(configs) > 1 else label(configs[0]),
        "quantity",
        "predicted",
        "measured",
        "error",
        f"against measured, ±{limit:.0%}",
        "90% interval",
    )
    return table(names, made, left=(0, 1))


def _predicted_and_measured(row: AccuracyRow) -> list[Markup]:
    if row.is_time:
        return [quantity(row.predicted), time_cell(row.measured, row.measured_low, row.measured_high)]
    shown = gib if "bytes" in row.quantity else _count
    within = f"{shown(row.predicted.low)} to {shown(row.predicted.high)}"
    source = el("small", str(row.predicted.source))
    return [
        el("td", shown(row.predicted.value), el("small", within), source, class_="n"),
        el("td", shown(row.measured), class_="n"),
    ]


def _count(value: float) -> str:
    return f"{value:,.0f}"
