"""Figure 10: hybrid placement against packing and least-loaded, and a sweep of its threshold L.

The worlds, forty seeds of them, and the runs are those of ``tests.bench.placement_under_load``, whose docstring
says what the paper leaves open; every policy gets the same deployments and requests. Here are its kept results.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean

from notebooks.figures.figure import NOT_GIVEN, Chart, Figure, Finding, Table
from placement.policies import DEFAULT_LOAD_THRESHOLD
from tests.bench.accuracy import RESULTS
from tests.bench.kept import read_kept

__all__ = ["figure_10", "rows_of_figure_10"]

Row = Mapping[str, float]
_HYBRID = f"hybrid L={DEFAULT_LOAD_THRESHOLD:g}"  # of the sweep, the one that iServe takes
_SHOWN = {
    "GPUs": "gpus_used",
    "GPU-hours": "gpu_hours",
    "p50 s": "e2e_p50_s",
    "p95 s": "e2e_p95_s",
    "slowdown p50": "slowdown_p50",
    "SLO missed": "slo_violation_fraction",
}


@cache
def rows_of_figure_10() -> Mapping[str, Sequence[Row]]:
    """Return rows by policy, one per seed. Columns are named as ``tests.bench.placement_under_load.Row``'s."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in json.loads(read_kept(RESULTS / "placement_under_load.json.gz"))["rows"]:
        if row["experiment"] == "figure 10":
            found[row["policy"]].append(row)
    return found


def figure_10() -> Figure:
    """Means over the seeds."""
    rows = rows_of_figure_10()
    means = {
        policy: {title: float(f"{fmean(one[name] for one in found):.4g}") for title, name in _SHOWN.items()}
        for policy, found in rows.items()
    }
    seeds = len(rows["packing"])
    thresholds = [policy for policy in means if policy.startswith("hybrid L=") and "moving" not in policy]
    return Figure(
        number="10",
        title="Placement policies under a fluctuating load, eight LLMs on eight A6000",
        source=f"simulated, roofline, tp=2, 16 bits, no batching, {seeds} seeds",
        tables=(
            Table(
                "means over the seeds", ("policy", *_SHOWN), tuple((p, *row.values()) for p, row in means.items())
            ),
        ),
        findings=(
            *(
                Finding(
                    f"GPUs used, {ours}", paper, f"{means[ours]['GPUs']:.3g} ({_range(rows[ours], 'gpus_used')})"
                )
                for ours, paper in (("least-loaded", "8"), ("packing", "4"), (_HYBRID, "5"))
            ),
            *(
                Finding(
                    f"{_HYBRID} over least-loaded, {title}",
                    f"{paper} higher (units lost: s or times)",
                    f"{means[_HYBRID][title] - means['least-loaded'][title]:.2g} s, "
                    f"{means[_HYBRID][title] / means['least-loaded'][title] - 1:.2f} times higher",
                )
                for title, paper in (("p50 s", "0.05 to 0.76"), ("p95 s", "0.45 to 2.08"))
            ),
            Finding("L that the paper took", NOT_GIVEN, f"{DEFAULT_LOAD_THRESHOLD:g} is iServe's default"),
        ),
        charts=(
            Chart(
                "p95",
                "s",
                ("packing", *(policy.replace("hybrid ", "hybrid\n") for policy in thresholds), "least-\nloaded"),
                (("p95", tuple(means[p]["p95 s"] for p in ("packing", *thresholds, "least-loaded"))),),
            ),
        ),
    )


def _range(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{min(values):g} to {max(values):g} over the seeds"
