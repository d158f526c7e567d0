"""A replay as one HTML page that needs nothing else, in the style of `iserve report`."""

from __future__ import annotations

from fingerprint.report.markup import Markup, el, join
from fingerprint.report.shell import html_page, sectioned
from fingerprint.report.tables import bullets, facts, table
from fingerprint.report.text import number, seconds
from iserve.replay.document import ReplayDocument, answered_words
from traces.panels import outcome_line, over_time, quantiles, tiles
from traces.summary import Percentiles, SloResult, Summary, limit_words

__all__ = ["render_replay"]

_READING = (
    "TTFT and E2E count from the moment at which the trace has the request, so that a sender that falls behind "
    "cannot hide a wait (coordinated omission); beside them, from the actual send.",
    "TPOT is the time after the first token divided by the tokens after the first. ITL is the gap between two "
    "pieces of an answer, which may hold several tokens.",
    "Latencies are those of completed requests; failed and refused ones count against the SLO.",
    "Lateness is how much later than scheduled the sender sent: what this client's machine adds.",
)


def render_replay(document: ReplayDocument) -> str:
    """Return the page, which works from a file, offline, in light and dark.

    Names and server's words are escaped.
    """
    sections = (
        ("latency", "Latency", _latency(document)),
        ("time", "The run over time", over_time(document.timeline, "Requests by their schedule")),
        ("slo", "SLO", _slo(document)),
        ("deployments", "Deployments", _deployments(document)),
        ("failures", "Failures", _failures(document)),
        ("run", "The run", _settings(document)),
        ("reading", "How to read this page", bullets(_READING)),
    )
    footer = f"Made by iServe; the run began at {document.run.started_at}. Every number is measured."
    return html_page(f"{document.run.trace}: iServe replay", sectioned(_head(document), sections, footer))


def _head(document: ReplayDocument) -> Markup:
    run, summary = document.run, document.summary
    figures = [
        ("requests", f"{summary.requests:,}"),
        ("completed", f"{summary.completed:,}"),
        ("failed", f"{summary.requests - summary.completed:,}"),
        ("offered", f"{number(summary.offered_requests_per_s)} requests/s"),
        ("output", f"{number(summary.output_tokens_per_s)} tokens/s"),
        ("TTFT p50, p99", _two(summary.ttft)),
        ("E2E p50, p99", _two(summary.e2e)),
    ]
    if summary.slo is not None:
        figures.append(("SLO attained", f"{summary.slo.attainment_fraction:.1%}"))
        figures.append(("goodput", f"{number(summary.slo.goodput_requests_per_s)} requests/s"))
    names = ", ".join(part.name for part in document.deployments)
    lead = f"{run.trace} at {run.rate_factor:g} times its rate, against {names} at {run.url}."
    return join(
        el("h1", "Replay"),
        outcome_line(answered_words(document), summary),
        el("p", lead, class_="lead"),
        el("p", f"Limits: {limit_words(summary.slo)}."),
        bullets(run.deployed) if run.deployed else None,
        tiles(figures),
        bullets(document.notes) if document.notes else None,
    )


def _two(found: Percentiles | None) -> str:
    return "none" if found is None else f"{seconds(found.p50_s)}, {seconds(found.p99_s)}"


def _latency(document: ReplayDocument) -> Markup:
    summary, curves = document.summary, document.curves
    rows = [
        ("TTFT", summary.ttft),
        ("TTFT from the actual send", summary.ttft_from_send),
        ("TPOT", summary.tpot),
        ("ITL", summary.itl),
        ("E2E", summary.e2e),
        ("E2E from the actual send", summary.e2e_from_send),
        ("lateness of the sender", summary.lateness),
    ]
    figures = [
        ("TTFT", (("from the schedule", "s-0", curves.ttft), ("from the send", "s-1", curves.ttft_from_send))),
        ("TPOT and ITL", (("TPOT", "s-2", curves.tpot), ("ITL", "s-3", curves.itl))),
        ("E2E", (("from the schedule", "s-0", curves.e2e),)),
        ("Lateness of the sender", (("lateness", "s-5", curves.lateness),)),
    ]
    return join(
        table(
            ("", "requests", "mean", "p50", "p90", "p95", "p99", "max"),
            [_percentile_row(name, found) for name, found in rows if found is not None],
            caption="ITL counts gaps, not requests.",
        ),
        el("div", [quantiles(name, lines) for name, lines in figures], class_="panels"),
    )


def _percentile_row(name: str, found: Percentiles) -> Markup:
    values = (found.mean_s, found.p50_s, found.p90_s, found.p95_s, found.p99_s, found.max_s)
    cells = [el("td", seconds(value), class_="n") for value in values]
    return el("tr", el("td", name, class_="l"), el("td", f"{found.count:,}", class_="n"), cells)


def _slo(document: ReplayDocument) -> Markup | None:
    slo = document.summary.slo
    if slo is None:
        return None
    missed = (
        ("TTFT", slo.ttft_s, slo.missed_ttft),
        ("TPOT", slo.tpot_s, slo.missed_tpot),
        ("E2E", slo.e2e_s, slo.missed_e2e),
    )
    return join(
        el("p", _slo_words(slo, document.summary)),
        table(
            ("limit", "seconds", "completed requests over it"),
            [
                el("tr", el("td", name, class_="l short"), el("td", f"{limit:g}"), el("td", f"{count:,}"))
                for name, limit, count in missed
                if limit is not None
            ],
        ),
    )


def _slo_words(slo: SloResult, summary: Summary) -> str:
    return (
        f"{slo.met:,} of {summary.requests:,} requests kept every limit ({slo.attainment_fraction:.1%}): a "
        f"goodput of {number(slo.goodput_requests_per_s)} requests/s, of "
        f"{number(summary.completed_requests_per_s)} completed."
    )


def _deployments(document: ReplayDocument) -> Markup | None:
    if len(document.deployments) < 2:
        return None
    rows = []
    for part in document.deployments:
        found = part.summary
        attained = "" if found.slo is None else f"{found.slo.attainment_fraction:.1%}"
        cells = (
            f"{found.requests:,}",
            f"{found.completed:,}",
            _two(found.ttft),
            _two(found.tpot),
            _two(found.e2e),
        )
        rows.append(el("tr", el("td", part.name, class_="l"), [el("td", cell) for cell in (*cells, attained)]))
    head = (
        "deployment",
        "requests",
        "completed",
        "TTFT p50, p99",
        "TPOT p50, p99",
        "E2E p50, p99",
        "SLO attained",
    )
    return table(head, rows)


def _failures(document: ReplayDocument) -> Markup | None:
    if not document.summary.failures:
        return None
    examples = {example.kind: example.words for example in document.examples}
    rows = [
        el(
            "tr",
            el("td", f.kind, class_="l"),
            el("td", f"{f.count:,}"),
            el("td", examples.get(f.kind, ""), class_="why"),
        )
        for f in document.summary.failures
    ]
    return table(("kind", "requests", "the first one"), rows, left=(0, 2))


def _settings(document: ReplayDocument) -> Markup:
    run, lengths = document.run, document.summary.lengths
    served = "not counted by the server" if lengths.input_tokens is None else f"{lengths.input_tokens:,}"
    return facts(
        [
            ("trace", run.trace),
            ("endpoint", run.url),
            ("began", run.started_at),
            ("took", seconds(run.elapsed_s)),
            ("requests planned", f"{run.planned_requests:,}"),
            ("rate factor", f"{run.rate_factor:g}"),
            ("rate offered", f"{number(document.summary.offered_requests_per_s)} requests/s"),
            ("limits", limit_words(document.summary.slo)),
            ("seed", str(run.seed)),
            ("timeout", f"{run.timeout_s:g} s"),
            ("most in flight", f"{run.max_in_flight:,}"),
            ("prompts", run.prompts),
            ("answers", "forced to the trace's length" if run.ignore_eos else "free to end"),
            ("prompt tokens", f"{served} of {lengths.asked_input_tokens:,} asked, completed requests"),
            ("output tokens", f"{lengths.output_tokens:,} of {lengths.asked_output_tokens:,} asked"),
        ]
    )
