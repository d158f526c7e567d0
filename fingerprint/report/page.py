"""The page: its sections in their order, its style sheet, its head. No script, no address of any other page."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from fingerprint.report import rankings, repeated, sections, truth
from fingerprint.report.markup import Markup, el, join
from fingerprint.report.values import Report

__all__ = ["page_body", "render_report"]

Section = Callable[[Report], Markup | None]

# (anchor, heading, what fills it); a section that has nothing to say is left out
_SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("model", "Model and machine", sections.model_and_machine),
    ("times", "Measured times and the fitted lines", sections.times),
    ("whole", "The whole model's time, from repeated fingerprints", repeated.whole_times),
    ("layer", "What one layer costs", sections.layer_effects),
    ("counted", "Memory as the engine counts it", repeated.counted_memory),
    ("memory", "Memory", sections.memory),
    ("pareto", "Latency against cost", sections.pareto),
    ("intents", "What each intent would choose", rankings.per_intent),
    ("all", "All configurations", rankings.all_configurations),
    ("errors", "Errors where the truth is known", truth.errors),
    ("reading", "How to read this page", sections.reading),
)


def render_report(report: Report) -> str:
    """One HTML page that needs nothing else: works from a file, offline, in light and dark."""
    style = files("fingerprint.report").joinpath("report.css").read_text(encoding="utf-8")
    page = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("title", f"{report.model}: iServe report"),
            el("style", Markup(style)),
        ),
        el("body", page_body(report)),
        lang="en",
    )
    return str(join(Markup("<!DOCTYPE html>\n"), page, "\n"))


def page_body(report: Report) -> Markup:
    """All that the page says."""
    filled = [(anchor, name, body) for anchor, name, of in _SECTIONS if (body := of(report)) is not None]
    contents = el("nav", [el("a", name, href=f"#{anchor}") for anchor, name, _ in filled], aria_label="Contents")
    parts = [el("section", el("h2", name), body, id=anchor) for anchor, name, body in filled]
    return el("main", sections.head(report), contents, parts, _footer(report))


def _footer(report: Report) -> Markup:
    return el(
        "footer",
        f"Made by iServe on {report.created_at}. Every number was measured, or computed from measurements or "
        "datasheets, and says which.",
    )
