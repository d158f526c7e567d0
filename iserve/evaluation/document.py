"""Document of ``iserve evaluate --json``: metrics of each contestant by world, intent and seed, and ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from iserve.evaluation.metrics import Metrics, score
from iserve.evaluation.world import Information, Interconnect, Truth
from planner.intent import Intent, IntentKind, Quality
from traces.simulator.result import VariantFigures

__all__ = [
    "MISSED_AT_MOST",
    "ContestantResult",
    "EvaluationDocument",
    "Promise",
    "SeedResult",
    "ServedVariants",
    "WorldResult",
    "compared",
    "ratio",
]

MISSED_AT_MOST = 1 - Intent().percentile / 100  # of the requests of a deployment whose plan promises its SLO


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """Share of one deployment's requests that miss their SLO."""

    deployment: str
    forecast: float
    """By its plan."""
    simulated: float

    @property
    def is_given(self) -> bool:
        """Return whether the plan promises to keep the SLO at the percentile of the intent."""
        return self.forecast <= MISSED_AT_MOST

    @property
    def is_kept(self) -> bool:
        return self.simulated <= MISSED_AT_MOST


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedVariants:
    """Variants of one deployment in its slots: loads, evictions, hits and waits."""

    deployment: str
    figures: VariantFigures


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedResult:
    """Outcome of one contestant for one seed."""

    seed: int
    metrics: Metrics
    score: float | None
    """Metric of the intent, the less the better; null: lost."""
    plan: tuple[str, ...]
    """Replicas: deployment, configuration, GPUs, requests at once, KV tokens."""
    reasons: tuple[str, ...]
    """Reasons for deployments without a replica, and notes."""
    simulations: int | None = None
    """Simulations of the oracle's search."""
    promises: tuple[Promise, ...] = ()
    """Shares of missed SLOs that plans forecast, and those that were simulated; none without a rate or an SLO."""
    variants: tuple[ServedVariants, ...] = ()
    """Figures of the deployments whose variants have slots; none where each is a deployment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestantResult:
    """Outcome of one contestant under one intent, over all seeds."""

    contestant: str
    intent: IntentKind
    has_trace: bool
    """Whether it has more information than the world gives."""
    seeds: tuple[SeedResult, ...]
    against_best: float | None = None
    """Score over that of the best contestant with the same information, geometric mean over the seeds."""
    against_rule: float | None = None
    """Score over that of the strong rule."""
    against_oracle: float | None = None
    """Score over that of the oracle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldResult:
    """Outcome of one world."""

    name: str
    about: str
    cluster: str
    information: Information
    quality: Quality
    truth: Truth
    interconnect: Interconnect = Interconnect.UNMEASURED  # in recordings from before links were measured
    changed: tuple[str, ...]
    """Fields that were changed on the command line, as FIELD=VALUE."""
    requests: tuple[int, ...]
    """Number of requests of each seed."""
    results: tuple[ContestantResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationDocument:
    """Evaluation: its worlds, and the wall time that it took."""

    worlds: tuple[WorldResult, ...]
    seconds: float


def ratio(own: Sequence[SeedResult], other: Sequence[SeedResult], intent: IntentKind) -> float | None:
    """Return the geometric mean over seeds of ``own``'s score over ``other``'s; None: either is lost for a seed.

    Shares of SLOs kept are compared as the other's share over the own, so that less is better there too.
    """
    logs = []
    for mine, theirs in zip(own, other, strict=True):
        if intent is IntentKind.LATENCY_SLO:
            above: float | None = theirs.metrics.slo_fraction
            below: float | None = mine.metrics.slo_fraction
        else:
            above, below = mine.score, theirs.score
        if above is None or below is None or below <= 0 or above <= 0:
            return None
        logs.append(math.log(above / below))
    return math.exp(sum(logs) / len(logs)) if logs else None


def compared(
    results: Sequence[ContestantResult], *, strong_rule: str, oracle: str
) -> tuple[ContestantResult, ...]:
    """Return ``results`` with their ratios to the best, the strong rule and the oracle of their intent."""
    found = []
    for result in results:
        alike = [other for other in results if other.intent is result.intent]
        named = {other.contestant: other.seeds for other in alike}
        best = _best([other.seeds for other in alike if not other.has_trace], result.intent)
        found.append(
            ContestantResult(
                contestant=result.contestant,
                intent=result.intent,
                has_trace=result.has_trace,
                seeds=result.seeds,
                against_best=None if best is None else ratio(result.seeds, best, result.intent),
                against_rule=_to(result, named.get(strong_rule)),
                against_oracle=_to(result, named.get(oracle)),
            )
        )
    return tuple(found)


def _to(result: ContestantResult, other: Sequence[SeedResult] | None) -> float | None:
    return None if other is None else ratio(result.seeds, other, result.intent)


def _best(results: Sequence[Sequence[SeedResult]], intent: IntentKind) -> Sequence[SeedResult] | None:
    """Return the results of the least mean score, of contestants that are lost for no seed."""

    def mean(seeds: Sequence[SeedResult]) -> float:
        scores = [score(seed.metrics, intent) for seed in seeds]
        return math.inf if None in scores else sum(one for one in scores if one is not None) / len(scores)

    best = min(results, key=mean, default=None)
    return None if best is None or math.isinf(mean(best)) else best
