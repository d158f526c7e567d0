"""Choosers of configurations, their regret and its summary. Pure; reads no file and runs nothing.

A cell is one model on one kind of GPU under one workload, with every alternative that was measured. A chooser sees
a cell's alternatives and, unlike the oracle, not their measured figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Quantity
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from iserve.planning.pipeline import FitsOn, PlanOptions, hypothetical_hardware
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo
from planner.plan import Candidate, LimitKind, Plan
from planner.rank import rank
from planner.space import formats, shape_refusal
from traces.baselines.rule_of_thumb import FAST_KINDS, rule_of_thumb

GIB = 2**30
NOT_IN_SPACE = "not in the configuration space"
NOISE = 0.02  # repeated runs of the public tables differ by up to 3%, half of them by less than 1.3%


SATURATED_BATCHES = tuple(sorted({n for k in range(12) for n in (2**k, 3 * 2**k // 2) if n <= 2048}))


class Metric(StrEnum):
    """Metric of a decision; ``measured`` has one figure for each that is known."""

    E2E = "e2e"  # s, of the whole batch
    TTFT = "ttft"  # s
    TPOT = "tpot"  # s
    GPU_SECONDS = "GPU-seconds"  # per request
    ENERGY = "energy"  # J per request
    TOKENS = "output tokens/s"  # of the deployment; the more the better
    MEMORY = "GiB"  # over all GPUs
    MEMORY_SECONDS = "GiB*s"  # per request


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The truth about one alternative. ``None``: not measured."""

    config: DeploymentConfig
    e2e_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    energy_j: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: float | None = None

    def value(self, metric: Metric, workload: Workload) -> float | None:
        """``metric`` of this alternative, None where it does not follow from what was measured."""
        match metric:
            case Metric.E2E:
                return self.e2e_s
            case Metric.TTFT:
                return self.ttft_s
            case Metric.TPOT:
                return self.tpot_s
            case Metric.ENERGY:
                return self.energy_j
            case Metric.TOKENS:
                return self.tokens_per_s
            case Metric.MEMORY:
                return None if self.memory_bytes is None else self.memory_bytes / GIB
            case Metric.MEMORY_SECONDS if self.memory_bytes is not None and self.e2e_s is not None:
                return self.memory_bytes / GIB * self.e2e_s / workload.batch
            case Metric.GPU_SECONDS if self.tokens_per_s is not None:
                return self.config.num_gpus * workload.output_tokens / self.tokens_per_s
            case Metric.GPU_SECONDS if self.e2e_s is not None:
                return self.config.num_gpus * self.e2e_s / workload.batch
        return None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Cell of decisions. ``saturated``: all requests were queued at once, the batch is the engine's to choose."""

    table: str
    engine: str
    model: str
    spec: ModelSpec
    gpu: GpuSpec
    workload: Workload
    alternatives: tuple[Measured, ...]
    saturated: bool = False
    served: bool = False  # ``batch`` requests at a time, one following the other, as a server's clients send them
    estimates: tuple[Estimate, ...] = ()  # of iServe's own fingerprints, one per alternative, where there are any


def workloads(cell: Cell) -> list[Workload]:
    """Return what a chooser may assume of a cell: its workload, or one per batch where the engine chose that."""
    return [replace(cell.workload, batch=b) for b in SATURATED_BATCHES] if cell.saturated else [cell.workload]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Question to a cell: the metric to optimise and, where ``limit`` is given, the one to keep below it."""

    kind: IntentKind
    metric: Metric
    limited: Metric | None = None
    limit: float = math.inf

    @property
    def maximize(self) -> bool:
        return self.metric is Metric.TOKENS

    @property
    def name(self) -> str:
        return (
            self.kind
            if self.limited in (None, Metric.E2E, Metric.GPU_SECONDS)
            else f"{self.kind} ({self.limited})"
        )


class Outcome(StrEnum):
    PICKED = "picked"
    REFUSED = "refused"  # it said that nothing would do, and something would have
    MISSED = "missed"  # its pick breaks the limit


@dataclass(frozen=True)
class Verdict:
    """``regret``: picked / best - 1, of what is maximised best / picked - 1; None if nothing valid was picked."""

    outcome: Outcome
    regret: float | None = None


Chooser = Callable[[Cell, Wish], DeploymentConfig | None]  # None: refused

QUANTILES = (0.2, 0.4, 0.6, 0.8)  # of two, three or four values none falls on one of them
_PLAIN = {
    IntentKind.MIN_LATENCY: Metric.E2E,
    IntentKind.MIN_GPU_HOURS: Metric.GPU_SECONDS,
    IntentKind.MIN_ENERGY: Metric.ENERGY,
    IntentKind.MAX_THROUGHPUT: Metric.TOKENS,
    IntentKind.MIN_MEMORY: Metric.MEMORY,
    IntentKind.MIN_COST: Metric.MEMORY_SECONDS,
}


def values(cell: Cell, metric: Metric) -> list[float] | None:
    """``metric`` of every alternative, None unless it is known of all."""
    found = [known for a in cell.alternatives if (known := a.value(metric, cell.workload)) is not None]
    return found if len(found) == len(cell.alternatives) else None


def wishes(cell: Cell) -> list[Wish]:
    """Every question that the cell's measurements can answer; limits lie at quantiles of the measured values.

    At a fixed batch ``max-throughput`` orders as ``min-latency`` does, and is asked of saturated cells only.
    """
    asked = [Wish(kind=kind, metric=metric) for kind, metric in _PLAIN.items() if values(cell, metric)]
    costs = values(cell, Metric.GPU_SECONDS)
    for limited in (Metric.E2E, Metric.TTFT, Metric.TPOT):
        if costs and (times := values(cell, limited)):
            asked += [
                Wish(kind=IntentKind.LATENCY_SLO, metric=Metric.GPU_SECONDS, limited=limited, limit=limit)
                for limit in _between(times)
            ]
    if costs and values(cell, Metric.E2E):
        asked += [
            Wish(kind=IntentKind.COST_SLO, metric=Metric.E2E, limited=Metric.GPU_SECONDS, limit=limit)
            for limit in _between(costs)
        ]
    return asked


def _between(measured: Sequence[float]) -> list[float]:
    return [float(np.quantile(measured, q)) for q in QUANTILES]


def judge(cell: Cell, wish: Wish, picked: DeploymentConfig | None) -> Verdict:
    """Hold one pick against the measured values."""
    if picked is None:
        return Verdict(Outcome.REFUSED)
    own = next(a for a in cell.alternatives if a.config == picked)
    if not _keeps(own, cell, wish):
        return Verdict(Outcome.MISSED)
    best, mine = (a.value(wish.metric, cell.workload) for a in (best_of(cell, wish), own))
    return Verdict(Outcome.PICKED, best / mine - 1 if wish.maximize else mine / best - 1)


def best_of(cell: Cell, wish: Wish) -> Measured:
    """The oracle's pick: the best measured value among those that keep the limit, which some always do."""
    best = _best(cell.alternatives, cell, wish)
    assert best is not None, "a limit at a quantile of the measured values is kept by some of them"
    return best


def _best(seen: Iterable[Measured], cell: Cell, wish: Wish) -> Measured | None:
    sign = -1 if wish.maximize else 1

    def order(found: Measured) -> tuple[object, ...]:
        return sign * found.value(wish.metric, cell.workload), found.config.num_gpus, found.config

    return min((found for found in seen if _keeps(found, cell, wish)), key=order, default=None)


def _keeps(alternative: Measured, cell: Cell, wish: Wish) -> bool:
    return wish.limited is None or alternative.value(wish.limited, cell.workload) <= wish.limit * (1 + 1e-9)


# --- the rule


def rule(cell: Cell, wish: Wish) -> DeploymentConfig:
    """Return max TP for what is about speed, fewest GPUs for what is about cost; the rule knows what ran.

    Of an SLO it keeps the limit if it can: the fastest for ``latency-slo``, the cheapest for ``cost-slo``. TP
    before PP; of formats the narrowest that the GPU multiplies.
    """
    return _end(cell, fast=wish.kind in FAST_KINDS)


def other_end(cell: Cell, wish: Wish) -> DeploymentConfig:
    """The rule the other way round: of an SLO it goes for the objective and leaves the limit to luck."""
    return _end(cell, fast=wish.kind not in FAST_KINDS)


def roomy_rule(cell: Cell, wish: Wish) -> DeploymentConfig:
    """The rule with a thought of the KV cache: no fewer GPUs than leave it half of their memory, where some do."""
    return _end(cell, fast=wish.kind in FAST_KINDS, room=0.5)


def _end(cell: Cell, *, fast: bool, room: float = 0.0) -> DeploymentConfig:
    order = rule_of_thumb(cell.spec, cell.gpu, fast=fast, room=room, every_gpu=True)
    return min((a.config for a in cell.alternatives), key=order)


# --- iServe


def intent_of(wish: Wish) -> Intent:
    """Return the question in the planner's words. Costs are GPU-seconds, which the tables can answer for."""
    slo = None
    if wish.kind is IntentKind.LATENCY_SLO:
        slo = Slo(**{f"{wish.limited}_s": wish.limit})
    memory_cost = wish.metric is Metric.MEMORY_SECONDS
    return Intent(
        kind=wish.kind,
        cost_model=CostModel.MEMORY_LATENCY if memory_cost else CostModel.GPU_HOURS,
        slo=slo,
        budget=wish.limit if wish.kind is IntentKind.COST_SLO else None,
        quality=Quality.ANY,
    )


class PlannerChooser:
    """iServe's planner and placement over the cell's alternatives.

    Args:
        estimate: what is predicted of a configuration in a cell; None where not even one request fits.
        at_value: judge limits on the estimate's value instead of the upper end of its interval. The product does
            not do that; it shows how much of a regret is caution.
    """

    def __init__(
        self, estimate: Callable[[Cell, DeploymentConfig], Estimate | None], *, at_value: bool = False
    ) -> None:
        self._estimate, self._at_value = estimate, at_value

    def __call__(self, cell: Cell, wish: Wish) -> DeploymentConfig | None:
        best = self._plan(cell, wish).best
        return None if best is None else best.config

    def cause(self, cell: Cell, wish: Wish) -> str:
        """Return why it did not pick what was measured to be best, where it did not."""
        if judge(cell, wish, self(cell, wish)).outcome is Outcome.MISSED:
            return "its pick is measured to miss the limit"
        right = best_of(cell, wish).config
        ranked = next(found for found in self._plan(cell, wish).candidates if found.config == right)
        if ranked.refusal == NOT_IN_SPACE:
            return NOT_IN_SPACE
        if ranked.refusal is not None or any(limit.kind is LimitKind.MEMORY for limit in ranked.missed):
            return "the best is predicted not to fit"
        return "the best is predicted to miss the limit" if ranked.missed else "predicted in another order"

    def _plan(self, cell: Cell, wish: Wish) -> Plan:
        num_gpus = max(a.config.num_gpus for a in cell.alternatives)
        usable = formats(cell.spec, cell.gpu)
        candidates = []
        for config in (a.config for a in cell.alternatives):
            refusal = shape_refusal(cell.spec, config, num_gpus)
            if (config.weights, config.kv, config.pruning) not in usable:
                refusal = NOT_IN_SPACE
            found = None if refusal else self._estimate(cell, config)
            if found is not None and self._at_value:
                found = replace(found, ttft_s=_sure(found.ttft_s), tpot_s=_sure(found.tpot_s))
            candidates.append(Candidate(config, found, refusal))
        intent = intent_of(wish)
        hardware = hypothetical_hardware(cell.gpu, num_gpus)
        return rank(candidates, intent, fits=FitsOn(hardware, PlanOptions(intent=intent)))


def _sure(quantity: Quantity) -> Quantity:
    return replace(quantity, low=quantity.value, high=quantity.value)


# --- anything that only predicts numbers


def predicted_chooser(predict: Callable[[Cell, DeploymentConfig], Measured | None]) -> Chooser:
    """The best of the predicted values among those whose predicted value keeps the limit; ties to fewer GPUs.

    Args:
        predict: None where nothing is predicted of the alternative, or it is predicted not to fit.
    """

    def choose(cell: Cell, wish: Wish) -> DeploymentConfig | None:
        seen = (predict(cell, a.config) for a in cell.alternatives)
        best = _best((found for found in seen if found is not None), cell, wish)
        return None if best is None else best.config

    return choose


# --- summary


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of one chooser over some decisions. Regrets are over those where it picked something valid.

    ``best``: shares of *all* decisions in which it picked the best measured one, and one within ``NOISE`` of it.
    """

    count: int
    refused: int
    missed: int
    best: float
    near_best: float
    median: float | None
    mean: float | None
    p90: float | None
    worst: float | None


def summarize(verdicts: Sequence[Verdict]) -> Summary:
    """Regret over ``verdicts``, of which there is at least one."""
    regrets = np.array([v.regret for v in verdicts if v.regret is not None])

    def of_regrets(statistic: Callable[[np.ndarray], float]) -> float | None:
        return round(float(statistic(regrets)), 5) if len(regrets) else None

    return Summary(
        count=len(verdicts),
        refused=sum(v.outcome is Outcome.REFUSED for v in verdicts),
        missed=sum(v.outcome is Outcome.MISSED for v in verdicts),
        best=round(float(np.sum(regrets <= 1e-9) / len(verdicts)), 5),
        near_best=round(float(np.sum(regrets <= NOISE) / len(verdicts)), 5),
        median=of_regrets(np.median),
        mean=of_regrets(np.mean),
        p90=of_regrets(lambda found: np.quantile(found, 0.9)),
        worst=of_regrets(np.max),
    )
