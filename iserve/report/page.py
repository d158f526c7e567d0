"""The page: its sections in their order, its style sheet, its head. No script, no address of any other page."""

from __future__ import annotations

from collections.abc import Callable

from iserve.report import accuracy_section, depth_tied, rankings, sections
from iserve.report.markup import Markup
from iserve.report.page_frame import html_page, sectioned
from iserve.report.values import Report

__all__ = ["page_body", "render_report"]

Section = Callable[[Report], Markup | None]

# (anchor, heading, what fills it); a section that has nothing to say is left out
_SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("model", "Model and machine", sections.model_and_machine),
    ("times", "Measured times and the fitted lines", sections.times),
    ("whole", "The whole model's time, from repeated fingerprints", depth_tied.whole_times),
    ("layer", "What one layer costs", sections.layer_effects),
    ("counted", "Memory as the engine counts it", depth_tied.counted_memory),
    ("memory", "Memory", sections.memory),
    ("pareto", "Latency against cost", sections.pareto),
    ("intents", "What each intent would choose", rankings.per_intent),
    ("all", "All configurations", rankings.all_configurations),
    ("errors", "Errors where the truth is known", accuracy_section.errors),
    ("reading", "How to read this page", sections.reading),
)


def render_report(report: Report) -> str:
    """Return a self-contained HTML page: works from a file, offline, in light and dark."""
    return html_page(f"{report.model}: iServe report", page_body(report))


def page_body(report: Report) -> Markup:
    """Return all that the page says."""
    filled = tuple((anchor, name, of(report)) for anchor, name, of in _SECTIONS)
    return sectioned(sections.head(report), filled, _footer(report))


def _footer(report: Report) -> str:
    return (
        f"Made by iServe on {report.created_at}. Every number was measured, or computed from measurements or "
        "datasheets, and says which."
    )
