"""The profiling report: one self-contained HTML page, or the same as Markdown, from values to text.

Decides how measurements, estimates, rankings and errors are shown. Reads no file but its own style sheet, measures
nothing, ranks nothing, and knows neither the planner nor a cluster: what it shows is handed in as :class:`Report`.
"""

from __future__ import annotations

from fingerprint.report.accuracy import AccuracyRecord, AccuracyRow
from fingerprint.report.markdown import render_markdown
from fingerprint.report.page import render_report
from fingerprint.report.times import TimePanel, time_panels
from fingerprint.report.values import Configuration, RankedRow, Ranking, Report, Verdict
from fingerprint.report.whole import WholeModel, whole_models

__all__ = [
    "AccuracyRecord",
    "AccuracyRow",
    "Configuration",
    "RankedRow",
    "Ranking",
    "Report",
    "TimePanel",
    "Verdict",
    "WholeModel",
    "render_markdown",
    "render_report",
    "time_panels",
    "whole_models",
]
