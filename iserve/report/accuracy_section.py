"""Values of the section that compares predictions with measurements of whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fingerprint.config import DeploymentConfig
from fingerprint.estimators.linear import Interval
from iserve.report.accuracy import AccuracyRecord, AccuracyRow
from iserve.report.charts import error_bar
from iserve.report.text import gib, label, percent
from iserve.report.values import Report

__all__ = ["QUANTITIES", "Comparison", "compared", "shown_as"]

_LIMITS = (0.1, 0.2, 0.5, 1.0)  # of the drawn errors, relative; intervals are cut there
_ROWS = 12  # of another model, that are shown at once
QUANTITIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "memory_bytes_per_gpu": "memory of the fullest GPU",
    "engine_bytes_per_gpu": "of it, counted by the engine",
    "weights_bytes_per_gpu": "weights on the fullest GPU",
    "non_kv_bytes_per_gpu": "memory without the KV cache",
    "kv_blocks": "KV blocks",
}


@dataclass(frozen=True, slots=True)
class ModelErrors:
    """Rows of one model. ``folded``: their sum in words, for a table that is not shown at once."""

    title: str
    rows: Sequence[AccuracyRow]
    folded: str | None

    @property
    def shared_config(self) -> DeploymentConfig | None:
        """Configuration of every row; None where they differ."""
        first, *others = dict.fromkeys(row.config for row in self.rows)
        return None if others else first

    @property
    def limit(self) -> float:
        """Error at the end of the drawn axis."""
        largest = max(abs(row.relative_error) for row in self.rows)
        return next((limit for limit in _LIMITS if limit >= largest), _LIMITS[-1])

    def bar(self, row: AccuracyRow) -> Markup:
        """Draw the prediction and its ends over what was measured, less one."""
        ends = (row.predicted.value, row.predicted.low, row.predicted.high)
        error = Interval(*(end / row.measured - 1 if row.measured else 0.0 for end in ends))
        named = f"{label(row.config)}, {row.quantity}: {percent(row.relative_error)}"
        return error_bar(error, self.limit, named, inside=row.inside)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Record of full models, this report's model first."""

    summary: str
    groups: tuple[ModelErrors, ...]


def compared(report: Report) -> Comparison | None:
    """Return predicted against measured, when a record of full models was given."""
    record = report.accuracy
    if record is None or not record.rows:
        return None
    groups = []
    for is_own, title in ((True, "This model"), (False, "Other models, same machine")):
        rows = [row for row in record.rows if (row.shape_hash == report.spec.shape_hash) is is_own]
        for model in dict.fromkeys(row.model for row in rows):
            found = [row for row in rows if row.model == model]
            folded = None if is_own or len(found) <= _ROWS else _judged(found)
            groups.append(ModelErrors(f"{title}: {model}", found, folded))
    return Comparison(_summary(record), tuple(groups))


def _summary(record: AccuracyRecord) -> str:
    times, sizes = [r for r in record.rows if r.is_time], [r for r in record.rows if not r.is_time]
    figures = [
        f"{len(rows)} {name}: {_judged(rows)}"
        for name, rows in (("times", times), ("memory figures", sizes))
        if rows
    ]
    machine = record.machine
    where = machine.cpu_model if machine.device.is_cpu else machine.device.name
    before, after = record.load_average_before, record.load_average_after
    load = "" if before is None or after is None else f" (load average {before:.2f} before, {after:.2f} after)"
    return (
        f"Fingerprints against the whole model, measured on {record.created_at} on {where}{load}. "
        f"{'; '.join(figures)}."
    )


def _judged(rows: Sequence[AccuracyRow]) -> str:
    absolute = sorted(abs(row.relative_error) for row in rows)
    return (
        f"{sum(row.inside for row in rows)} inside the predicted 90% interval, median error "
        f"{absolute[len(absolute) // 2]:.1%}, largest {absolute[-1]:.1%}"
    )


def shown_as(quantity: str) -> Callable[[float], str]:
    """Return the words of a quantity that is no time: bytes, or a count."""
    return gib if "bytes" in quantity else "{:,.0f}".format
