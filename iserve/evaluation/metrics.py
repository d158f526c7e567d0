"""Metrics of one contestant in one world for one seed: latencies of all requests, SLOs, GPU-hours, cost, guard."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iserve.evaluation.arena import Arena
from planner.intent import IntentKind
from traces.simulator.held import cost_under_load
from traces.simulator.result import SimulationResult

__all__ = ["LEAST_ANSWERED", "Metrics", "Quantiles", "metrics_of", "missed_of", "quantile", "score"]

LEAST_ANSWERED = 0.99  # of all requests; with fewer a cost or a number of GPU-hours is lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Quantiles over all requests in seconds; None: that request was not answered."""

    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Metrics of a contestant for one seed."""

    requests: int
    answered_fraction: float
    e2e: Quantiles
    ttft: Quantiles
    slo_fraction: float  # of all requests, those that kept their SLO
    gpu_hours: float  # of GPUs on which anything was placed
    cost_gpu_s: float | None  # per completed request: GPU x seconds; None: none was completed
    cost_usd: float | None  # likewise; None too where the GPU has no price
    guard_ratio: (
        float | None
    )  # worst model's P95 of E2E over alone, its variants included; None: a request of that P95 is unanswered
    guard_kept: bool


def quantile(values: NDArray[np.floating], fraction: float) -> float | None:
    """Return the lower order statistic of ``fraction``, where NaN is later than any number; None: it is NaN."""
    if not len(values):
        return None
    ordered = np.sort(values)  # NaN last
    found = float(ordered[max(0, math.ceil(fraction * len(ordered)) - 1)])
    return None if math.isnan(found) else found


def metrics_of(arena: Arena, result: SimulationResult) -> Metrics:
    """Return the metrics of ``result``, in which all requests of ``arena`` were followed to their end."""
    outcomes, world = result.outcomes, arena.world
    completed = outcomes.completed
    e2e_s = np.where(completed, outcomes.e2e_s, np.nan)
    ttft_s = np.where(completed, outcomes.ttft_s, np.nan)
    alone_s = arena.all_alone_s
    answered = int(completed.sum())
    gpu_s = sum(gpu.held_fraction for gpu in result.gpus) * result.end_s
    cost = cost_under_load(
        result.held, answered, placed_gpu_s=gpu_s, usd_per_gpu_hour=arena.gpu.price_usd_per_gpu_hour
    )
    of = [arena.model_of[name] for name in outcomes.deployments]
    ratios = []
    for model in dict.fromkeys(of):
        own = np.isin(outcomes.deployment, [index for index, name in enumerate(of) if name == model])
        if own.any():
            ratios.append(quantile((e2e_s / alone_s)[own], 0.95))
    known = [ratio for ratio in ratios if ratio is not None]
    worst = max(known) if len(known) == len(ratios) else None
    fraction = answered / len(outcomes)
    return Metrics(
        requests=len(outcomes),
        answered_fraction=fraction,
        e2e=_quantiles(e2e_s),
        ttft=_quantiles(ttft_s),
        slo_fraction=float((e2e_s <= world.slo_multiple * alone_s).mean()),
        gpu_hours=gpu_s / 3600,
        cost_gpu_s=cost.gpu_s_per_request,
        cost_usd=cost.usd_per_request,
        guard_ratio=worst,
        guard_kept=fraction >= LEAST_ANSWERED and worst is not None and worst <= world.guard_multiple,
    )


def missed_of(arena: Arena, result: SimulationResult) -> dict[str, float]:
    """Return the share of each deployment's requests that miss their SLO; of one without requests nothing."""
    outcomes = result.outcomes
    e2e_s = np.where(outcomes.completed, outcomes.e2e_s, np.inf)
    missed = e2e_s > arena.world.slo_multiple * arena.all_alone_s
    rows = {name: outcomes.deployment == index for index, name in enumerate(outcomes.deployments)}
    return {name: float(missed[own].mean()) for name, own in rows.items() if own.any()}


def score(metrics: Metrics, intent: IntentKind) -> float | None:
    """Return the metric that ``intent`` is judged by, the less the better; None: lost.

    The P50 of E2E, the share of SLOs missed, GPU x seconds per request within the guard, or GPU-hours with nearly
    all requests answered.
    """
    match intent:
        case IntentKind.MIN_COST:
            return metrics.cost_gpu_s if metrics.guard_kept else None
        case IntentKind.MIN_GPU_HOURS:
            return metrics.gpu_hours if metrics.answered_fraction >= LEAST_ANSWERED else None
        case IntentKind.LATENCY_SLO:
            return 1 - metrics.slo_fraction
        case _:
            return metrics.e2e.p50_s


def _quantiles(values: NDArray[np.floating]) -> Quantiles:
    return Quantiles(p50_s=quantile(values, 0.5), p95_s=quantile(values, 0.95), p99_s=quantile(values, 0.99))
