"""``iserve simulate --json``, and what its terminal summary is printed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from fingerprint.config import Workload
from placement.rebalancer import Elastic
from planner.intent import Intent, Slo
from traces.outcomes import Failure, Outcomes
from traces.simulator.held import HeldGpu, LoadCost, cost_under_load
from traces.simulator.kv_use import KvUse
from traces.simulator.result import (
    Change,
    ChangeKind,
    DeploymentFigures,
    GpuFigures,
    SimulationResult,
    VariantFigures,
)
from traces.simulator.scenario import Service
from traces.simulator.step_model import Limits
from traces.summary import Summary, limit_words, outcome_words, summarize
from traces.timeline import Bin, CurvePoint, curve, timeline

__all__ = [
    "DeploymentOutcome",
    "LatencyCurves",
    "SimulationDocument",
    "SimulationSetup",
    "answered_words",
    "cost_words",
    "devices_told",
    "failure_reasons",
    "intent_words",
    "late_words",
    "policy_words",
    "simulation_document",
]

_GROWING = 10  # waiting at the last arrival, of one deployment: below, it is nothing to speak of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentOutcome:
    """Outcome of one deployment: its arrivals, and how they were served. ``summary`` is None without arrivals."""

    name: str
    replicas: int  # as the last request of the trace arrived, as the next four
    waiting: int
    peak_replicas: int  # at once
    cold_starts: int  # from zero replicas, by a request
    scaled_to_zero_s: float  # at zero replicas
    moves: int  # replicas that went to other GPUs
    limits: Limits | None  # that its latest replica was launched with; None: it was never deployed
    kv: KvUse | None  # None: no bounded KV cache was followed (one request at a time, or --service stepped)
    variants: VariantFigures | None  # None: it has no adapter slots
    cost: LoadCost  # its GPU-hours are of every GPU that it was placed on
    summary: Summary | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyCurves:
    """Quantiles of one deployment's completed requests, from their arrival."""

    name: str
    ttft: tuple[CurvePoint, ...]
    e2e: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSetup:
    """Parameters of a simulation."""

    trace: str
    hardware: str
    service: Service
    rejects_late: bool  # requests that could not keep the SLO any more
    rejects_by_forecast: (
        bool  # ... by what iServe's gateway knows on their arrival; else by exact times at their turn
    )
    planner: str  # which decided what was deployed
    placement: str  # iServe's policy for where
    startup_s: float  # from the decision until a worker serves, the longest of the engines
    usd_per_gpu_hour: float | None  # list price; None: not known
    cluster_policy: Elastic | None  # what could change once it ran; None: nothing
    intent: Intent  # what deployments were planned by; the SLO that requests are judged by is the summary's
    workload: Workload  # what deployments were planned for
    times: tuple[str, ...]  # of each model: where its step times are from


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationDocument(SimulationSetup):
    """Simulation: its parameters and its result."""

    end_s: float
    stopped: str | None
    gpu_hours: float  # of GPUs that held anything
    cost: LoadCost  # of all deployments
    summary: Summary
    deployments: tuple[DeploymentOutcome, ...]
    changes: tuple[Change, ...]
    gpus: tuple[GpuFigures, ...]
    held: tuple[HeldGpu, ...]  # by GPU and deployment
    timeline: tuple[Bin, ...]
    curves: tuple[LatencyCurves, ...]  # of each deployment that was asked anything
    notes: tuple[str, ...]  # what the planner says of its decision, where that is not iServe's
    warnings: tuple[str, ...]


def simulation_document(
    setup: SimulationSetup,
    result: SimulationResult,
    *,
    slo: Slo | None,
    notes: tuple[str, ...] = (),
    model_contexts: Mapping[str, int] | None = None,
) -> SimulationDocument:
    """Return the figures of ``result``, with ``slo`` judged on each request.

    Args:
        model_contexts: the most tokens of a sequence by each deployment's model; None: not known.
    """
    parts = dict(result.outcomes.by_deployment())
    price, placed_s = setup.usd_per_gpu_hour, sum(gpu.held_fraction for gpu in result.gpus) * result.end_s
    moves = Counter(change.name for change in result.changes if change.kind is ChangeKind.MOVED)
    return SimulationDocument(
        **{field.name: getattr(setup, field.name) for field in fields(setup)},
        end_s=result.end_s,
        stopped=result.stopped,
        gpu_hours=placed_s / 3600,
        cost=cost_under_load(
            result.held, int(result.outcomes.completed.sum()), placed_gpu_s=placed_s, usd_per_gpu_hour=price
        ),
        summary=summarize(result.outcomes, slo),
        deployments=tuple(
            DeploymentOutcome(
                name=figures.name,
                replicas=figures.replicas,
                waiting=figures.waiting,
                peak_replicas=figures.peak_replicas,
                cold_starts=figures.cold_starts,
                scaled_to_zero_s=figures.scaled_to_zero_s,
                moves=moves[figures.name],
                limits=figures.limits,
                kv=figures.kv,
                variants=figures.variants,
                cost=_cost_of(figures.name, parts, result.held, price),
                summary=summarize(parts[figures.name], slo) if figures.name in parts else None,
            )
            for figures in result.deployments
        ),
        changes=result.changes,
        gpus=result.gpus,
        held=result.held,
        timeline=timeline(result.outcomes),
        curves=tuple(_curves(name, part) for name, part in parts.items()),
        notes=notes,
        warnings=_warnings(result, model_contexts or {}),
    )


def _cost_of(
    name: str, outcomes: Mapping[str, Outcomes], held: Sequence[HeldGpu], usd_per_gpu_hour: float | None
) -> LoadCost:
    """Return the cost of one deployment."""
    own = [each for each in held if each.deployment == name]
    completed = int(outcomes[name].completed.sum()) if name in outcomes else 0
    placed_s = sum(each.placed_s for each in own)
    return cost_under_load(own, completed, placed_gpu_s=placed_s, usd_per_gpu_hour=usd_per_gpu_hour)


def cost_words(document: SimulationDocument) -> str:
    """Return the cost of a completed request, in GPU x s and dollars, and requests per GPU-hour."""
    cost = document.cost
    if cost.gpu_s_per_request is None or cost.requests_per_gpu_hour is None:
        return f"cost under load: {cost.gpu_s:,.4g} GPU x s held, no request was completed"
    said = f"cost under load: {cost.gpu_s_per_request:.4g} GPU x s of held share"
    if cost.usd_per_request is not None and document.usd_per_gpu_hour is not None:
        said += f", ${cost.usd_per_request:.3g} at ${document.usd_per_gpu_hour:g} a GPU-hour,"
    return f"{said} per completed request; {cost.requests_per_gpu_hour:,.4g} requests per GPU-hour"


def _curves(name: str, outcomes: Outcomes) -> LatencyCurves:
    done = outcomes.select(outcomes.completed)
    return LatencyCurves(name=name, ttft=curve(done.ttft_s), e2e=curve(done.e2e_s))


def devices_told(device_ids: Sequence[str]) -> str:
    """Return ``a6000:0-3, a6000:6`` for 0, 1, 2, 3 and 6: numbers in a row are written as one range."""
    runs: list[tuple[str, int, int]] = []
    said: list[str] = []
    for device_id in device_ids:
        name, _, number = device_id.rpartition(":")
        if not (name and number.isdecimal()):
            said.append(device_id)
        elif runs and (name, int(number) - 1) == (runs[-1][0], runs[-1][2]):
            runs[-1] = (name, runs[-1][1], int(number))
        else:
            runs.append((name, int(number), int(number)))
    ranges = (f"{name}:{low}" if low == high else f"{name}:{low}-{high}" for name, low, high in runs)
    return ", ".join((*ranges, *said))


def answered_words(document: SimulationDocument) -> str:
    """Return one line: how many requests failed and why, and how many were answered."""
    return outcome_words(document.summary, failure_reasons(document))


def failure_reasons(document: SimulationDocument) -> dict[str, str]:
    """Return what each kind of failure means in a simulation."""
    reasons = {
        Failure.BAD_REQUEST: f"longer than {_longest_words(document.deployments)}",
        Failure.NOT_SERVED: "without a deployment to serve them",
        Failure.RATE_LIMITED: "rejected by a full queue",
        Failure.TOO_LATE: "rejected as too late for the SLO",
        Failure.CONNECTION_LOST: "lost with the node that served them",
        Failure.INTERRUPTED: "unfinished when the simulation was stopped",
    }
    return {kind.words: words for kind, words in reasons.items()}


def _longest_words(deployments: Sequence[DeploymentOutcome | DeploymentFigures]) -> str:
    """Return the longest request that is served; without a number where deployments differ."""
    served = {one.limits.max_context_tokens for one in deployments if one.limits is not None}
    return f"the {served.pop():,} tokens that are served" if len(served) == 1 else "their deployment serves"


def intent_words(intent: Intent) -> str:
    """Return what deployments were planned by: the intent, its limits, and the rate."""
    limits = "no latency limits" if intent.slo is None else limit_words(intent.slo)
    rate = "no rate given" if intent.rate_per_s is None else f"{intent.rate_per_s:g} requests/s"
    if intent.slo is not None and intent.rate_per_s is not None:
        limits += f" at p{intent.percentile:g}"
    budget = "" if intent.budget is None else f", at most {intent.budget:g} a request by {intent.cost_model}"
    return f"{intent.kind}, {limits}, {rate}{budget}, quality {intent.quality}"


def late_words(document: SimulationDocument) -> str:
    """Describe the rejection of late requests, in words that follow the service; empty without any."""
    if not document.rejects_late:
        return ""
    return f", late requests rejected by {'forecast' if document.rejects_by_forecast else 'their exact times'}"


def policy_words(policy: Elastic) -> str:
    """Return what could change during the run, as part of a sentence."""
    said, scaling = [], policy.scaling
    if scaling is not None and scaling.min_replicas < scaling.max_replicas:
        said.append(f"{scaling.min_replicas} to {scaling.max_replicas} replicas by the load")
    if scaling is not None and scaling.idle_s is not None:
        said.append(f"none after {scaling.idle_s:g} s without a request")
    if policy.consolidates:
        said.append("consolidating")
    if policy.migration is not None:
        said.append("moving")
    return ", ".join(said)


def _warnings(result: SimulationResult, model_contexts: Mapping[str, int]) -> tuple[str, ...]:
    outcomes = result.outcomes
    too_long = int((outcomes.failure == Failure.BAD_REQUEST).sum())
    said = [] if result.stopped is None else [result.stopped]
    if too_long:
        served = [(each.name, each.limits.max_context_tokens) for each in result.deployments if each.limits]
        binds = all(longest == model_contexts.get(name) for name, longest in served)
        said.append(
            f"{too_long} requests are longer than {_longest_words(result.deployments)}, and refused; "
            + (
                "the model's context holds no more: cut them with --cap-lengths"
                if binds
                else "make room for them with --context, or cut them with --cap-lengths"
            )
        )
    never = [c.name for c in result.changes if c.kind is ChangeKind.REFUSED]
    placed = {c.name for c in result.changes if c.kind is ChangeKind.DEPLOYED}
    said += [f"{name} was never deployed" for name in dict.fromkeys(never) if name not in placed]
    if result.stopped is None:  # else the trace has not ended, and what waits too long is reported
        said += [_grew(figures) for figures in result.deployments if _queue_grew(figures)]
    return tuple(said)


def _queue_grew(figures: DeploymentFigures) -> bool:
    return figures.waiting >= _GROWING and figures.waiting >= figures.arrived / 20


def _grew(figures: DeploymentFigures) -> str:
    return (
        f"{figures.waiting} of the {figures.arrived} requests of {figures.name} still waited as the trace ended: "
        "more requests arrive than it serves, and in a longer trace they would wait longer"
    )
