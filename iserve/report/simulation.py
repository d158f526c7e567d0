"""Page of a simulation."""

from __future__ import annotations

from iserve.planning.words import workload_words
from iserve.report.page_frame import render
from iserve.report.run_charts import over_time, quantiles
from iserve.simulation.document import (
    SimulationDocument,
    answered_words,
    cost_words,
    devices_told,
    failure_reasons,
    intent_words,
    late_words,
    policy_words,
)
from traces.summary import limit_words

__all__ = ["render_simulation"]

_MOST_LINES = 6  # of a chart: there are no more colours


def render_simulation(document: SimulationDocument) -> str:
    """Return the page."""
    shown = document.curves[:_MOST_LINES]
    return render(
        "simulation.html",
        document=document,
        answered=answered_words(document),
        cost=cost_words(document),
        intent=intent_words(document.intent),
        late=late_words(document),
        limits=limit_words(document.summary.slo),
        cluster_policy=None if document.cluster_policy is None else policy_words(document.cluster_policy),
        planned=workload_words(document.workload),
        reasons=failure_reasons(document),
        devices=devices_told,
        curves=[
            quantiles("TTFT", [(each.name, f"s-{i}", each.ttft) for i, each in enumerate(shown)]),
            quantiles("E2E", [(each.name, f"s-{i}", each.e2e) for i, each in enumerate(shown)]),
        ],
        most_lines=_MOST_LINES,
        timeline=over_time(document.timeline, "Requests by their arrival"),
    )
