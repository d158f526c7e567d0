"""Tables of docs/placement.md: the policies, and from recorded results policies, replicas, distances to exact."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["exact_gaps", "exact_gaps_in_part", "named_policies", "of_policies", "of_replicas"]

Row = dict[str, Any]
_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "GPUs used": ("gpus_used", "{:.1f}".format),
    "GPU-hours": ("gpu_hours", "{:.2f}".format),
    "E2E p50": ("e2e_p50_s", "{:.1f}".format),
    "E2E p95": ("e2e_p95_s", "{:.1f}".format),
    "SLOs missed": ("slo_violation_fraction", lambda share: f"{100 * share:.1f}"),
}
_UNITS = {"E2E p50": " s", "E2E p95": " s", "SLOs missed": "%"}
_OPTIMAL = 1e-3  # a relative gap below: what breaks ties of min-memory does not count
_LOOK_AHEAD = "the place that leaves the cluster cheapest to run (`iserve simulate` only)"


def named_policies() -> str:
    """Return what ``--policy`` takes, and where each policy places a model."""
    from placement.policies import ILP, JOINT, POLICIES, policy_names

    where = {name: make().places_on for name, make in POLICIES.items()} | {
        JOINT: "the GPUs that serve it best under load, chosen together with its configuration, replicas and "
        "KV cache ([joint plans](#joint-plans))",
        ILP: "the place where requests take least time, [exactly](#exact-placement)",
    }
    lines = [_line("policy", "places a model on"), "|---|---|"]
    for name in policy_names(sees_load=True):
        default = " (default)" if name == JOINT else ""
        lines.append(_line(f"`{name}`{default}", where.get(name, _LOOK_AHEAD)))
    return "\n".join(lines)


def of_policies(rows: Sequence[Row], experiment: str = "figure 10") -> str:
    """Return mean and standard deviation over the seeds of every policy of ``experiment``."""
    return _table(rows, experiment, tuple(_COLUMNS))


def of_replicas(rows: Sequence[Row], num_gpus: int) -> str:
    """Return the same of the worlds with replicas, with the share of requests that were not served."""
    return _table(rows, f"elastic {num_gpus}", tuple(_COLUMNS)[1:], unserved=True)


def _table(rows: Sequence[Row], experiment: str, columns: Sequence[str], *, unserved: bool = False) -> str:
    lines = [_line("policy", *columns, *(["not served"] if unserved else []))]
    lines.append("|" + "---|" * (len(columns) + 1 + unserved))
    for policy in dict.fromkeys(row["policy"] for row in rows if row["experiment"] == experiment):
        seeds = [row for row in rows if (row["experiment"], row["policy"]) == (experiment, policy)]
        cells = [_spread([row[_COLUMNS[name][0]] for row in seeds], name) for name in columns]
        if unserved:
            cells.append(f"{sum(row['unserved'] for row in seeds) / sum(row['requests'] for row in seeds):.0%}")
        lines.append(_line(policy, *cells))
    return "\n".join(lines)


def _spread(values: Sequence[float], name: str) -> str:
    shown, unit = _COLUMNS[name][1], _UNITS.get(name, "")
    mean, deviation = shown(statistics.fmean(values)), shown(statistics.stdev(values))
    return f"{mean}{unit}" if float(deviation) == 0 else f"{mean} ± {deviation}{unit}"


def exact_gaps(recorded: Row) -> str:
    """Return how far each heuristic is from the exact placement, where both place every model."""
    cases: Sequence[Row] = recorded["cases"]
    lines = [
        "| policy | configuration | places fewer models | optimal | mean gap | p90 | worst "
        "| of the mean, by place |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for index, (policy, way) in enumerate(recorded["rules"]):
        own = [case["by"][index] for case in cases]
        fewer = sum(one["models"] < case["placed"] for one, case in zip(own, cases, strict=True))
        gaps = sorted(_gaps(cases, index))
        by_place = statistics.fmean(one["cost"] - one["same_configs"] for one in own if _is_both(one))
        lines.append(
            _line(
                policy,
                _short(way),
                str(fewer),
                f"{_optimal(gaps):.0%}",
                f"{statistics.fmean(gaps):.1%}",
                f"{gaps[int(0.9 * len(gaps))]:.1%}",
                f"{gaps[-1]:.0%}",
                f"{by_place:.1%}",
            )
        )
    return "\n".join(lines)


def _short(way: str) -> str:
    return way.removeprefix("by load, ")


def exact_gaps_in_part(recorded: Row, policy: str = "least-loaded") -> str:
    """Return mean gap and share of optimal placements of ``policy``, by intent and by number of models."""
    cases: Sequence[Row] = recorded["cases"]
    groups = {f"`{intent}`": [c for c in cases if c["intent"] == intent] for intent in _intents(cases)}
    for number, name in ((1, "one model"), (2, "two models"), (3, "three models")):
        groups[name] = [case for case in cases if case["models"] == number]
    ways = {_short(way): index for index, (name, way) in enumerate(recorded["rules"]) if name == policy}
    lines = [_line("clusters", *ways), "|" + "---|" * (len(ways) + 1)]
    for name, members in groups.items():
        found = [list(_gaps(members, index)) for index in ways.values()]
        lines.append(_line(name, *(f"{statistics.fmean(gaps):.1%}; {_optimal(gaps):.0%}" for gaps in found)))
    return "\n".join(lines)


def _intents(cases: Sequence[Row]) -> Iterator[str]:
    usual = ("min-cost", "min-latency", "min-gpu-hours", "min-memory", "max-throughput")
    found = {case["intent"] for case in cases}
    return (intent for intent in usual if intent in found)


def _gaps(cases: Sequence[Row], index: int) -> Iterator[float]:
    return (case["by"][index]["cost"] - 1 for case in cases if _is_both(case["by"][index]))


def _is_both(heuristic: Row) -> bool:
    return heuristic["cost"] is not None and heuristic["same_configs"] is not None


def _optimal(gaps: Sequence[float]) -> float:
    return sum(gap < _OPTIMAL for gap in gaps) / len(gaps)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
