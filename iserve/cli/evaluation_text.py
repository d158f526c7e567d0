"""Text of ``iserve evaluate``: a table for each world and intent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from iserve.cli.render import console, print_rows, seconds
from iserve.evaluation.document import MISSED_AT_MOST
from planner.intent import IntentKind

if TYPE_CHECKING:
    from iserve.evaluation.document import ContestantResult, EvaluationDocument, WorldResult
    from iserve.evaluation.metrics import Metrics

__all__ = ["print_evaluation"]

_JUDGED_BY = {
    IntentKind.MIN_COST: "GPU x s per request, within the guard",
    IntentKind.MIN_LATENCY: "P50 of E2E",
    IntentKind.LATENCY_SLO: "share of SLOs kept",
    IntentKind.MIN_GPU_HOURS: "GPU-hours held, with 99% answered",
}
_MOST_REASONS = 40  # that are shown; a deployment of each of many variants may have one each
_HEAD = (
    "contestant", "/best", "/rule", "/oracle", "E2E p50", "p95", "TTFT p95", "answered", "SLO", "GPU-h", "GPU x s",
    "$/1k", "guard",
)  # fmt: skip


def print_evaluation(document: EvaluationDocument) -> None:
    """Print every contestant's means over the seeds, world by world and intent by intent."""
    for world in document.worlds:
        _print_world(world)


def _print_world(world: WorldResult) -> None:
    out, truth = console(), world.truth
    out.print(f"{world.name}: {world.about}", style="bold")
    changed = f"; set {', '.join(world.changed)}" if world.changed else ""
    out.print(
        f"{world.cluster}, information {world.information}, links {world.interconnect}, quality {world.quality}, "
        f"{' + '.join(f'{number:,}' for number in world.requests)} requests; "
        f"truth: all-reduce x{truth.all_reduce:g}, sharing {truth.sharing:g}, steps x{truth.step_times:g}, "
        f"start-up {truth.startup_s:g} s{changed}"
    )
    for intent in dict.fromkeys(result.intent for result in world.results):
        out.print(f"{intent}: judged by {_JUDGED_BY[intent]}")
        of_intent = [result for result in world.results if result.intent is intent]
        print_rows(_HEAD, [_row(result) for result in of_intent])
        for words in filter(None, map(_promises, of_intent)):
            out.print(words)
        for words in (words for result in of_intent for words in _slots(result)):
            out.print(words)
    reasons = {
        f"{result.contestant}, {result.intent}: {reason}"
        for result in world.results
        for seed in result.seeds
        if seed.simulations is None
        for reason in seed.reasons
    }
    for reason in sorted(reasons)[:_MOST_REASONS]:
        out.print(reason)
    if len(reasons) > _MOST_REASONS:
        out.print(f"and {len(reasons) - _MOST_REASONS:,} more, which --json has")


def _row(result: ContestantResult) -> tuple[str, ...]:
    metrics = [seed.metrics for seed in result.seeds]
    lost = any(seed.score is None for seed in result.seeds)
    name = f"{result.contestant}*" if result.has_trace else result.contestant
    return (
        name,
        "lost" if lost else _ratio(result.against_best),
        "lost" if lost else _ratio(result.against_rule),
        "lost" if lost else _ratio(result.against_oracle),
        _mean(metrics, lambda m: m.e2e.p50_s, seconds),
        _mean(metrics, lambda m: m.e2e.p95_s, seconds),
        _mean(metrics, lambda m: m.ttft.p95_s, seconds),
        _mean(metrics, lambda m: m.answered_fraction, lambda value: f"{value:.1%}"),
        _mean(metrics, lambda m: m.slo_fraction, lambda value: f"{value:.1%}"),
        _mean(metrics, lambda m: m.gpu_hours, lambda value: f"{value:.3g}"),
        _mean(metrics, lambda m: m.cost_gpu_s, lambda value: f"{value:.3g}"),
        _mean(metrics, lambda m: m.cost_usd, lambda value: f"{1000 * value:.3g}"),
        _mean(metrics, lambda m: m.guard_ratio, lambda value: f"{value:.2f}"),
    )


def _promises(result: ContestantResult) -> str | None:
    """Return how many plans promise to keep the SLO, and how many of those do; None: none promises anything."""
    promises = [promise for seed in result.seeds for promise in seed.promises]
    kept = [promise.is_kept for promise in promises if promise.is_given]
    if not promises:
        return None
    return (
        f"{result.contestant}: {len(kept)} of {len(promises)} plans promise at most {MISSED_AT_MOST:.0%} missed, "
        f"{sum(kept)} keep it"
    )


def _slots(result: ContestantResult) -> list[str]:
    """Return what became of the variants of each deployment in their slots, means over the seeds."""
    lines = []
    for deployment in dict.fromkeys(one.deployment for seed in result.seeds for one in seed.variants):
        found = [one.figures for seed in result.seeds for one in seed.variants if one.deployment == deployment]
        requests, loads = sum(one.requests for one in found), sum(one.loads for one in found)
        hits = sum(one.hits for one in found) / max(1, requests)
        lines.append(
            f"{result.contestant}: {found[0].slots} slots for variants of {deployment}, {loads / len(found):,.0f} "
            f"loads, {hits:.1%} of {requests / len(found):,.0f} requests found theirs loaded"
        )
    return lines


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(metrics: Sequence[Metrics], of: Callable[[Metrics], float | None], words: Callable[[float], str]) -> str:
    """Return the mean over the seeds; a dash where one of them has none."""
    values = [of(one) for one in metrics]
    known = [value for value in values if value is not None]
    return words(sum(known) / len(known)) if known and len(known) == len(values) else "-"
