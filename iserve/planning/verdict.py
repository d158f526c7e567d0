"""Verdict on a model: what was chosen, what it will do, what is second, whether it can be deployed here.

Typed figures, computed once; :mod:`iserve.planning.verdict_text` puts them into words for terminals and pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate, Estimator, Quantity
from fingerprint.gpu_spec import GpuSpec
from iserve.planning.deployability import DeployableDocument
from iserve.planning.pipeline import Hardware, PlanOptions, winner_at
from iserve.planning.runner_up import RunnerUpDocument, runner_up
from iserve.planning.words import devices, spoken
from planner.intent import IntentKind
from planner.plan import LoadForecast, Plan, Ranked, RefusedFor, WhyNot

__all__ = ["FiguresDocument", "RefusalCount", "VerdictDocument", "figures_of", "verdict"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FiguresDocument:
    """Figures of the chosen configuration at the planned load; all replicas together serve the rates.

    Without a rate the load is the batch, handed over again and again, of which as much runs at once as finds slots
    for its variants. With one, the times are still those of the batch; ``load_forecast`` of the plan has those at
    the rate.
    """

    ttft_s: Quantity
    """Time to first token of the batch, in seconds."""
    tpot_s: Quantity
    """Time per output token of the batch, in seconds."""
    e2e_s: Quantity
    """Time of a whole request of the batch, in seconds."""
    requests_per_s: float
    """Requests per second; with a rate the highest that keeps the limits."""
    output_tokens_per_s: float
    """Output tokens per second, at the rate or, without one, at `requests_per_s`."""
    usd_per_million_output_tokens: float | None
    """US dollars per million output tokens, prompts included; None: the GPU has no known price."""
    usd_per_gpu_hour: float | None
    """US dollars of one GPU for an hour; None: not known."""
    requests_at_once: float | None = None
    """Requests of the batch that run at once on average: all of it, or as many as find slots for their variants.
    None: a plan stored before this was recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusalCount:
    """Number of configurations refused for one reason, which is the first that each has."""

    reason: RefusedFor
    """Kind of the first reason of each refusal."""
    count: int
    """Number of configurations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictDocument:
    """``iserve plan --json`` and the first screen of every plan."""

    sentence: str
    """Chosen configuration in one sentence, or that none is feasible."""
    figures: FiguresDocument | None
    """Figures at the planned load; None: nothing is feasible."""
    runner_up: RunnerUpDocument | None
    """Next feasible configuration with other figures; None: none."""
    deployable: DeployableDocument | None
    """Whether the chosen configuration can be deployed here; None: none was chosen, or it was not judged."""
    refusals: tuple[RefusalCount, ...]
    """Refused configurations by their first reason, the commonest first."""
    first_relaxation: str | None = None
    """Smallest change that would make something feasible; None: something is."""
    slo_batch: int | None = None
    """Requests at once that the SLO was judged with; None: no SLO, or judged at the rate."""


def verdict(
    plan: Plan,
    *,
    model: str,
    hardware: Hardware,
    estimator: Estimator,
    options: PlanOptions,
    deployable: DeployableDocument | None = None,
) -> VerdictDocument:
    """Judge ``plan``, which ``estimator`` and ``options`` made on ``hardware``.

    Args:
        deployable: of the chosen configuration; None: not judged.
    """

    def winner(configs: tuple[DeploymentConfig, ...], batch: int, kind: IntentKind) -> Ranked | None:
        return winner_at(hardware, estimator, options, configs, batch, kind)

    best, gpu, num_gpus = plan.best, hardware.gpu, len(hardware.snapshot.gpus)
    if best is None or best.estimate is None:
        there = f"{num_gpus} {devices(gpu.name, num_gpus)}"
        return VerdictDocument(
            sentence=f"No configuration of {model} on {there} keeps every limit",
            figures=None,
            runner_up=None,
            deployable=None,
            refusals=_refusals(plan),
            first_relaxation=_first_relaxation(plan.why_not),
        )
    layers = None if best.layout is None else best.layout.layers_per_stage
    return VerdictDocument(
        sentence=spoken(
            model, best.config, gpu=gpu.name, num_gpus=num_gpus, layers_per_stage=layers, replicas=options.replicas
        ),
        figures=figures_of(best.estimate, gpu, served=plan.served, replicas=options.replicas),
        # Deployments that are expected are like the candidates of a whole plan, which other loads would need.
        runner_up=runner_up(plan, None if options.expect else winner),
        deployable=deployable,
        refusals=_refusals(plan),
        slo_batch=None if options.intent.slo is None or plan.served is not None else options.workload.batch,
    )


def figures_of(
    estimate: Estimate, gpu: GpuSpec, *, served: LoadForecast | None = None, replicas: int = 1
) -> FiguresDocument:
    """Return the figures of one configuration on ``gpu``.

    Args:
        served: what one replica gives under its share of the rate; None: the batch is kept full.
    """
    work, price = estimate.workload, gpu.price_usd_per_gpu_hour
    full_per_s = estimate.at_once / estimate.e2e_s.value
    highest_per_s, planned_per_s = (full_per_s, full_per_s)
    if served is not None:
        highest_per_s, planned_per_s = served.highest_rate_per_s, served.rate_per_s
    tokens_per_s = planned_per_s * work.output_tokens
    cost = None if price is None else price * estimate.config.num_gpus / 3600 / tokens_per_s * 1e6
    return FiguresDocument(
        ttft_s=estimate.ttft_s,
        tpot_s=estimate.tpot_s,
        e2e_s=estimate.e2e_s,
        requests_per_s=replicas * highest_per_s,
        output_tokens_per_s=replicas * tokens_per_s,
        usd_per_million_output_tokens=cost,
        usd_per_gpu_hour=price,
        requests_at_once=estimate.at_once,
    )


def _refusals(plan: Plan) -> tuple[RefusalCount, ...]:
    reasons: Iterable[RefusedFor | None] = (ranked.refused_for for ranked in plan.candidates)
    counted = Counter(reason for reason in reasons if reason is not None)
    order = list(RefusedFor)
    found = sorted(counted.items(), key=lambda item: (-item[1], order.index(item[0])))
    return tuple(RefusalCount(reason=reason, count=count) for reason, count in found)


def _first_relaxation(why: WhyNot) -> str | None:
    """Return what admits the nearest configuration, else what is first."""
    nearest = why.nearest
    own = [r.text for r in why.relaxations if nearest is not None and r.config == nearest.config]
    together = [] if why.combined_relaxation is None else [why.combined_relaxation.text]
    return next(iter([*own, *together, *(r.text for r in why.relaxations)]), None)
