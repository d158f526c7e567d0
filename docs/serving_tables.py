"""Tables of recorded results on serving: the gateway's delay, and the rejection of late requests on an H200."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["gateway_table", "late_table"]

Recorded = Sequence[dict[str, Any]]

# Row, case, figure, decimals and unit, goal (at most, or at least where it is a rate).
_GATEWAY = (
    ("added at 50 requests/s, p50", "not streamed, 50 requests/s", "added_p50_ms", "{:.2f} ms", 1.0),
    ("added at 50 requests/s, p99", "not streamed, 50 requests/s", "added_p99_ms", "{:.1f} ms", 5.0),
    ("1 MiB prompt at 10/s, added p50", "1 MiB prompt, 10 requests/s", "added_p50_ms", "{:.1f} ms", None),
    ("1 MiB prompt at 10/s, added p99", "1 MiB prompt, 10 requests/s", "added_p99_ms", "{:.1f} ms", 15.0),
    (
        "not streamed, 32 at once",
        "not streamed, 32 at once",
        "gateway_requests_per_s",
        "{:,.0f} requests/s",
        3000.0,
    ),
    (
        "200 streams of 20 chunks/s, added gap p99",
        "200 streams at 20 chunks/s",
        "added_gap_p99_ms",
        "{:.1f} ms",
        None,
    ),
    ("1,000 streams of 20 chunks/s, failed", "1000 streams at 20 chunks/s", "gateway_failed", "{:.0f}", 0.0),
    (
        "1,000 streams of 20 chunks/s, added gap p99",
        "1000 streams at 20 chunks/s",
        "added_gap_p99_ms",
        "{:.1f} ms",
        10.0,
    ),
)


def gateway_table(runs: Recorded) -> str:
    """Return the median of all rounds of all runs with the least and the most, next to the goals."""
    lines = ["| case | rounds | median [least, most] | goal | rounds within it |", "|---|--:|---|---|--:|"]
    for row, case, figure, shown, goal in _GATEWAY:
        rounds = [
            value
            for run in runs
            for result in run["results"]
            if result["case"] == case
            for value in result["figures"][figure]
        ]
        is_rate = figure.endswith("_per_s")
        kept = "" if goal is None else str(sum(v >= goal if is_rate else v <= goal for v in rounds))
        number, _, unit = shown.format(statistics.median(rounds)).partition(" ")
        ends = ", ".join(shown.format(end(rounds)).partition(" ")[0] for end in (min, max))
        bound = "" if goal is None else f"at {'least' if is_rate else 'most'} {goal:,g} {unit}".rstrip()
        lines.append(f"| {row} | {len(rounds)} | {f'{number} {unit}'.rstrip()} [{ends}] | {bound} | {kept} |")
    return "\n".join(lines)


def late_table(recorded: Recorded) -> str:
    """Return one row per rate: the same requests without and with ``--reject-late``."""
    lines = [
        "| requests/s | requests | kept the SLO: without | with | rejected | queue full: without "
        "| of the answered kept it: without | with | P50, P99 of E2E: without | with |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(recorded, key=lambda run: float(run["rate_per_s"])):
        (without,) = (form for form in run["forms"] if not form["refusing"])
        (rejecting,) = (form for form in run["forms"] if form["refusing"])
        pair = without, rejecting
        cells = [
            f"{run['rate_per_s']:g}",
            str(without["requests"]),
            *(f"{form['kept_fraction']:.1%}" for form in pair),
            f"{rejecting['refused_late'] / rejecting['requests']:.1%}",
            str(without["refused_else"]),
            *(_percent(form["kept_of_answered"]) for form in pair),
            *(f"{form['e2e_p50_s']:#.3g}, {form['e2e_p99_s']:#.3g} s" for form in pair),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return "100%" if share == 1 else f"{share:.1%}"
