"""Page of a replayed trace."""

from __future__ import annotations

from iserve.replay.document import ReplayDocument, answered_words
from iserve.report.page_frame import render
from iserve.report.run_charts import over_time, quantiles
from traces.summary import limit_words

__all__ = ["render_replay"]


def render_replay(document: ReplayDocument) -> str:
    """Return the page."""
    return render(
        "replay.html",
        document=document,
        answered=answered_words(document),
        limits=limit_words(document.summary.slo),
        quantiles=quantiles,
        timeline=over_time(document.timeline, "Requests by their schedule"),
    )
