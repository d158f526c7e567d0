"""A simulation as one HTML page that needs nothing else, in the style of the other reports."""

from __future__ import annotations

from fingerprint.report.markup import Markup, el, join
from fingerprint.report.shell import html_page, sectioned
from fingerprint.report.tables import bullets, facts, table
from fingerprint.report.text import gib, number, seconds
from iserve.simulation.document import (
    DeploymentOutcome,
    SimulationDocument,
    answered_words,
    devices_told,
    failure_reasons,
    intent_words,
    late_words,
    policy_words,
)
from traces.panels import outcome_line, over_time, quantiles, tiles
from traces.summary import Percentiles, Summary, limit_words

__all__ = ["render_simulation"]

_MOST_LINES = 6  # of a chart: there are no more colours
_READING = (
    "Nothing of this was served: step times are predicted, and everything that decides is what decides in "
    "production.",
    "TTFT and E2E count from the request's arrival. Failed requests have no latency and keep no SLO.",
    "GPU-hours held: of GPUs that anything had a place on, busy or not.",
)


def render_simulation(document: SimulationDocument) -> str:
    """Return the page, which works from a file, offline. Names are escaped."""
    sections = (
        ("latency", "Latency", _latency(document)),
        ("time", "The run over time", over_time(document.timeline, "Requests by their arrival")),
        ("steering", "Scaling and moves", _steering(document)),
        ("gpus", "GPUs", _gpus(document)),
        ("failures", "Requests that failed", _failures(document)),
        ("changes", "What happened", _changes(document)),
        ("run", "What was simulated", _settings(document)),
        ("reading", "How to read this page", bullets((*_READING, *document.notes))),
    )
    footer = f"Made by iServe. Step times: {'; '.join(document.times)}."
    return html_page(f"{document.trace}: iServe simulation", sectioned(_head(document), sections, footer))


def _head(document: SimulationDocument) -> Markup:
    summary = document.summary
    figures = [
        ("requests", f"{summary.requests:,}"),
        ("answered", f"{summary.completed:,}"),
        ("failed", f"{summary.requests - summary.completed:,}"),
        ("offered", f"{number(summary.offered_requests_per_s)} requests/s"),
        ("TTFT p50, p99", _two(summary.ttft)),
        ("E2E p50, p99", _two(summary.e2e)),
        ("GPU-hours held", number(document.gpu_hours)),
    ]
    if summary.slo is not None:
        figures.append(("SLO attained", f"{summary.slo.attainment_fraction:.1%}"))
    return join(
        el("h1", "Simulation"),
        outcome_line(answered_words(document), summary),
        el("p", f"{document.trace} on {document.hardware}, {document.service}.", class_="lead"),
        el("p", f"Intent {intent_words(document.intent)}. Requests are judged by: {limit_words(summary.slo)}."),
        tiles(figures),
        bullets(document.warnings) if document.warnings else None,
    )


def _two(found: Percentiles | None) -> str:
    return "none" if found is None else f"{seconds(found.p50_s)}, {seconds(found.p99_s)}"


def _row(*cells: str, left: tuple[int, ...] = (0,)) -> Markup:
    return el("tr", [el("td", cell, class_="l" if i in left else "n") for i, cell in enumerate(cells)])


def _latency(document: SimulationDocument) -> Markup:
    rows = [_summary_row(d.name, d.summary) for d in document.deployments if d.summary is not None]
    if len(rows) > 1:
        rows.append(_summary_row("all", document.summary))
    head = ("deployment", "answered", "TTFT p50, p99", "TPOT p50, p99", "E2E p50, p99", "SLO attained")
    shown = document.curves[:_MOST_LINES]
    figures = (
        ("TTFT", [(each.name, f"s-{i}", each.ttft) for i, each in enumerate(shown)]),
        ("E2E", [(each.name, f"s-{i}", each.e2e) for i, each in enumerate(shown)]),
    )
    drawn = [quantiles(name, lines) for name, lines in figures]
    left_out = len(document.curves) - len(shown)
    return join(
        table(head, rows),
        el("div", drawn, class_="panels"),
        el("p", f"Drawn are the first {len(shown)} deployments of {len(document.curves)}.") if left_out else None,
    )


def _summary_row(name: str, summary: Summary) -> Markup:
    attained = "" if summary.slo is None else f"{summary.slo.attainment_fraction:.1%}"
    answered = f"{summary.completed:,} of {summary.requests:,}"
    return _row(name, answered, _two(summary.ttft), _two(summary.tpot), _two(summary.e2e), attained)


def _steering(document: SimulationDocument) -> Markup | None:
    if document.cluster_policy is None:
        return None

    def row(d: DeploymentOutcome) -> Markup:
        return _row(d.name, str(d.peak_replicas), str(d.cold_starts), seconds(d.scaled_to_zero_s), str(d.moves))

    return join(
        el("p", f"Cluster policy: {policy_words(document.cluster_policy)}."),
        table(
            ("deployment", "peak replicas", "cold starts", "at zero", "moves"),
            [row(d) for d in document.deployments],
        ),
    )


def _gpus(document: SimulationDocument) -> Markup:
    rows = [
        _row(
            g.device_id,
            g.node_id,
            f"{g.busy_fraction:.1%}",
            f"{g.held_fraction:.1%}",
            gib(g.peak_bytes),
            gib(g.total_bytes),
            left=(0, 1),
        )
        for g in document.gpus
    ]
    return table(("GPU", "node", "busy", "held", "most memory", "of"), rows, left=(0, 1))


def _failures(document: SimulationDocument) -> Markup | None:
    failures, reasons = document.summary.failures, failure_reasons(document)
    if not failures:
        return None
    rows = [_row(f.kind, f"{f.count:,}", reasons.get(f.kind, ""), left=(0, 2)) for f in failures]
    return table(("kind", "requests", "why"), rows, left=(0, 2))


def _changes(document: SimulationDocument) -> Markup:
    rows = [
        el(
            "tr",
            el("td", f"{c.at_s:,.1f} s", class_="n"),
            [el("td", text, class_="l short") for text in (c.kind, c.name)],
            [el("td", text, class_="why") for text in (c.text, devices_told(c.device_ids))],
        )
        for c in document.changes
    ]
    return table(("at", "what", "whose", "how", "GPUs"), rows, left=(1, 2, 3, 4))


def _settings(document: SimulationDocument) -> Markup:
    work = document.workload
    planned = f"batch {work.batch}, {work.input_words} input and {work.output_tokens} output tokens"
    planned += f", requests of up to {work.longest_tokens}" if work.longest_tokens else ""
    return facts(
        [
            ("trace", document.trace),
            ("cluster", document.hardware),
            ("planner", document.planner),
            ("placement", document.placement),
            (
                "cluster policy",
                "none" if document.cluster_policy is None else policy_words(document.cluster_policy),
            ),
            ("service", f"{document.service}{late_words(document)}"),
            ("intent", intent_words(document.intent)),
            ("planned for", planned),
            ("requests judged by", limit_words(document.summary.slo)),
            ("rate of the trace", f"{number(document.summary.offered_requests_per_s)} requests/s"),
            ("simulated", seconds(document.end_s)),
        ]
    )
