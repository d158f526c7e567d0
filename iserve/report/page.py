"""Page of a report: its values given to the templates."""

from __future__ import annotations

from functools import partial

from iserve.report import charts, depth_tied, sections
from iserve.report.accuracy_section import QUANTITIES, compared, shown_as
from iserve.report.full_model import KV_SHARE
from iserve.report.page_frame import render
from iserve.report.values import Report

__all__ = ["render_report"]


def render_report(report: Report) -> str:
    """Return the page; a section that has nothing to say is left out."""
    weights = sorted({str(series.weights) for panel in report.panels for series in panel.series})
    return render(
        "report.html",
        report=report,
        charts=charts,
        bursts=sections.bursts(report),
        weights=[(f"c-{name}", "round", f"{name} weights") for name in weights],
        memory_bars=sections.memory_bars(report),
        memory_legend=[(f"m-{part}", "", said) for part, said in charts.MEMORY_PARTS],
        plane=sections.plane(report),
        reasons=sections.reasons,
        most_rows=sections.MOST_ROWS,
        answers=depth_tied.answer_lengths(report),
        batch_charts=partial(depth_tied.batch_charts, report),
        readings=depth_tied.readings,
        step_legend=[(f"p-{part}", "", said) for part, said, _ in charts.STEP_PARTS],
        kv_share=KV_SHARE,
        compared=compared(report),
        quantities=QUANTITIES,
        shown_as=shown_as,
    )
