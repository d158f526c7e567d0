"""A simulation as people read it in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iserve.cli.render import console, gib, print_rows, seconds, workload_words
from iserve.simulation.document import (
    answered_words,
    cost_words,
    devices_told,
    intent_words,
    late_words,
    policy_words,
)
from traces.summary import limit_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iserve.simulation.document import DeploymentOutcome, SimulationDocument
    from traces.simulator.result import VariantFigures
    from traces.summary import Percentiles, Summary

__all__ = ["print_simulation"]

_CHANGES = 30


def print_simulation(document: SimulationDocument) -> None:
    """Print deployments with their latencies, GPUs, what happened, and what to be wary of."""
    out, whole = console(), document.summary
    failed = whole.completed < whole.requests
    out.print(answered_words(document), style="bold red" if failed else "bold")
    by = "" if document.planner == "iserve" else f" by {document.planner}"
    planned = f"planned{by} for {workload_words(document.workload)}"
    placed = f", {document.placement} placement" if document.planner == "iserve" else ""
    late = late_words(document)
    out.print(f"{document.trace} on {document.hardware}, {document.service}, {planned}{placed}{late}")
    out.print(f"intent: {intent_words(document.intent)}; requests are judged by: {limit_words(whole.slo)}")
    if document.cluster_policy is not None:
        out.print(f"cluster policy: {policy_words(document.cluster_policy)}")
    out.print(
        f"{document.end_s:,.1f} simulated seconds, "
        f"{whole.offered_requests_per_s:.4g} requests/s offered, {whole.completed_requests_per_s:.4g} served, "
        f"{document.gpu_hours:.4g} GPU-hours held"
    )
    out.print(f"{cost_words(document)}; workers start in {document.startup_s:g} s")
    rows = [_row(d.name, d.summary, d.replicas) for d in document.deployments if d.summary is not None]
    if len(rows) > 1:
        rows.append(_row("all", whole, sum(d.replicas for d in document.deployments)))
    head = (
        "deployment",
        "replicas",
        "answered",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "E2E p50",
        "p90",
        "p99",
        "SLO",
    )
    print_rows(head, rows)
    if document.cluster_policy is not None:
        print_rows(
            ("deployment", "peak replicas", "cold starts", "at zero", "moves"),
            [_steered(d) for d in document.deployments],
        )
    print_rows(
        ("deployment", "KV mean", "peak", "preemptions", "recomputed", "GPU x s", "per request", "per GPU-hour"),
        [_held(d) for d in document.deployments if d.summary is not None],
    )
    _print_variants([(d.name, d.variants) for d in document.deployments if d.variants is not None])
    print_rows(
        ("GPU", "node", "busy", "most memory", "of"),
        [
            (g.device_id, g.node_id, f"{g.busy_fraction:.1%}", gib(g.peak_bytes), gib(g.total_bytes))
            for g in document.gpus
        ],
    )
    for change in document.changes[:_CHANGES]:
        where = f" [{devices_told(change.device_ids)}]" if change.device_ids else ""
        out.print(f"{change.at_s:>9.1f} s  {change.kind} {change.name}: {change.text}{where}")
    if len(document.changes) > _CHANGES:
        out.print(f"... and {len(document.changes) - _CHANGES} more (--json lists all)")
    out.print(f"step times: {'; '.join(document.times)}")
    for note in document.notes:
        out.print(note)
    for warning in document.warnings:
        out.print(f"warning: {warning}")


def _row(name: str, summary: Summary, replicas: int) -> tuple[str, ...]:
    slo = "-" if summary.slo is None else f"{summary.slo.attainment_fraction:.1%}"
    return (
        name,
        str(replicas),
        f"{summary.completed:,}/{summary.requests:,}",
        *_times(summary.ttft),
        _times(summary.tpot)[0],
        *_times(summary.e2e),
        slo,
    )


def _steered(d: DeploymentOutcome) -> tuple[str, ...]:
    return (d.name, str(d.peak_replicas), str(d.cold_starts), seconds(d.scaled_to_zero_s), str(d.moves))


def _print_variants(variants: Sequence[tuple[str, VariantFigures]]) -> None:
    if not variants:
        return
    print_rows(
        ("deployment", "variants", "slots", "loads", "each", "evictions", "hits", "wait p50", "p90", "p99"),
        [_loads(name, found) for name, found in variants],
    )
    print_rows(
        ("deployment", "warm", "TTFT p50", "p90", "p99", "cold", "TTFT p50", "p90", "p99"),
        [_warm_and_cold(name, found) for name, found in variants],
    )


def _loads(name: str, found: VariantFigures) -> tuple[str, ...]:
    """Return a row of what was loaded, and how long requests waited for a worker with their adapter."""
    hits = f"{found.hits / found.requests:.1%}" if found.requests else "-"
    each = seconds(found.load_s) if found.load_s else "not counted"
    counts = (f"{found.asked_for:,}", str(found.slots), f"{found.loads:,}", each, f"{found.evictions:,}")
    return (name, *counts, hits, *_times(found.waiting))


def _warm_and_cold(name: str, found: VariantFigures) -> tuple[str, ...]:
    warm, cold = found.ttft_warm, found.ttft_cold
    counts = [f"{0 if one is None else one.count:,}" for one in (warm, cold)]
    return (name, counts[0], *_times(warm), counts[1], *_times(cold))


def _held(d: DeploymentOutcome) -> tuple[str, ...]:
    """Return a row of what a deployment held: its KV cache, and GPUs."""
    kv, cost = d.kv, d.cost
    tokens = ("-",) * 4
    if kv is not None:
        tokens = (
            f"{kv.mean_fraction:.1%}",
            f"{kv.peak_fraction:.1%}",
            f"{kv.preemptions:,}",
            f"{kv.recomputed_tokens:,} tokens",
        )
    per_request = "-" if cost.gpu_s_per_request is None else f"{cost.gpu_s_per_request:.4g}"
    per_hour = "-" if cost.requests_per_gpu_hour is None else f"{cost.requests_per_gpu_hour:,.4g}"
    return (d.name, *tokens, f"{cost.gpu_s:,.4g}", per_request, per_hour)


def _times(of: Percentiles | None) -> tuple[str, str, str]:
    if of is None:
        return ("-", "-", "-")
    return (seconds(of.p50_s), seconds(of.p90_s), seconds(of.p99_s))
