"""A replay in a terminal: one line while it runs, tables and small charts at its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from iserve.cli.render import console, print_rows, seconds
from iserve.cli.sanitized_output import beneath
from iserve.replay.document import answered_words
from traces.summary import limit_words

if TYPE_CHECKING:
    from iserve.replay.document import ReplayDocument
    from iserve.replay.runner import Progress
    from traces.summary import Percentiles, Summary

__all__ = ["ProgressLine", "print_replay"]

_BARS = "▁▂▃▄▅▆▇█"
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """On a terminal one line, written again; else one for each tenth. Cheap: it shares the sender's thread."""

    def __init__(self, out: TextIO, *, quiet: bool) -> None:
        self._out, self._quiet = beneath(out), quiet
        self._live = out.isatty() and not quiet
        self._tenth = -1

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._out.write(_CLEAR)
            self._out.flush()

    def show(self, progress: Progress) -> None:
        if self._quiet:
            return
        if self._live:
            width = shutil.get_terminal_size().columns
            self._out.write(_CLEAR + _progress_words(progress)[: width - 1])
        else:
            tenth = 10 * (progress.completed + progress.failed) // progress.total
            if tenth == self._tenth:
                return
            self._tenth = tenth
            self._out.write(_progress_words(progress) + "\n")
        self._out.flush()


def _progress_words(progress: Progress) -> str:
    rate = progress.output_tokens / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
    failed = f", {progress.failed} failed" if progress.failed else ""
    planned = f" of {progress.scheduled_end_s:.0f}" if progress.begun < progress.total else ""
    return (
        f"{progress.elapsed_s:.0f}{planned} s  sent {progress.begun} of {progress.total}"
        f", {progress.in_flight} in flight, {progress.completed} done{failed}  {rate:,.0f} tokens/s  "
        f"late at most {seconds(progress.lateness_max_s)}"
    )


def print_replay(document: ReplayDocument) -> None:
    """Print figures, charts over the run, failures, notes."""
    run, summary, out = document.run, document.summary, console()
    names = ", ".join(part.name for part in document.deployments)
    failed = summary.completed < summary.requests
    out.print(answered_words(document), style="bold red" if failed else "bold")
    out.print(f"{run.trace} at {run.rate_factor:g} times its rate on {names} at {run.url}")
    out.print(
        f"{seconds(run.elapsed_s)}; requests/s: "
        f"{summary.offered_requests_per_s:.3g} offered, {summary.completed_requests_per_s:.3g} completed; "
        f"{summary.output_tokens_per_s:.4g} tokens/s"
    )
    for words in run.deployed:
        out.print(words)
    rows = [_row(name, found) for name, found in _quantities(summary) if found is not None]
    if rows:
        print_rows(("", "count", "mean", "p50", "p90", "p95", "p99", "max"), rows)
    for line in _charts(document):
        out.print(line)
    if summary.slo is not None:
        slo = summary.slo
        out.print(
            f"SLO of {limit_words(slo)}: {slo.attainment_fraction:.1%} of requests kept it, goodput "
            f"{slo.goodput_requests_per_s:.3g} requests/s; over TTFT {slo.missed_ttft}, TPOT {slo.missed_tpot}, "
            f"E2E {slo.missed_e2e}"
        )
    if len(document.deployments) > 1:
        print_rows(
            ("deployment", "requests", "completed", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99"),
            [(part.name, *_deployment(part.summary)) for part in document.deployments],
        )
    examples = {example.kind: example.words for example in document.examples}
    for failure in summary.failures:
        out.print(f"failed: {failure.count} {failure.kind}, such as: {examples.get(failure.kind, '')}")
    for note in document.notes:
        out.print(f"note: {note}")


def _quantities(summary: Summary) -> list[tuple[str, Percentiles | None]]:
    return [
        ("TTFT", summary.ttft),
        ("  from the actual send", summary.ttft_from_send),
        ("TPOT", summary.tpot),
        ("ITL", summary.itl),
        ("E2E", summary.e2e),
        ("  from the actual send", summary.e2e_from_send),
        ("lateness of the sender", summary.lateness),
    ]


def _row(name: str, found: Percentiles) -> tuple[str, ...]:
    values = (found.mean_s, found.p50_s, found.p90_s, found.p95_s, found.p99_s, found.max_s)
    return (name, f"{found.count:,}", *map(seconds, values))


def _deployment(summary: Summary) -> tuple[str, ...]:
    pairs = (summary.ttft, summary.tpot, summary.e2e)
    times = [("", "") if found is None else (seconds(found.p50_s), seconds(found.p99_s)) for found in pairs]
    return (str(summary.requests), str(summary.completed), *(time for pair in times for time in pair))


def _charts(document: ReplayDocument) -> list[str]:
    """Return charts over the run, a column per bin; nothing where there is nothing."""
    bins = document.timeline
    if len(bins) < 3:
        return []
    return [
        _chart("requests/s", [b.scheduled / b.width_s for b in bins], "{:.3g}".format),
        _chart("in flight", [b.in_flight for b in bins], "{:.0f}".format),
        _chart("TTFT p50", [b.ttft_p50_s for b in bins], seconds),
    ]


def _chart(name: str, values: Sequence[float | None], words: Callable[[float], str]) -> str:
    most = max((value for value in values if value is not None), default=0.0)
    bars = "".join(_BARS[min(int(8 * value / most), 7)] if value else " " for value in values)
    return f"{name:<11} {bars}  up to {words(most)}"
