"""``iserve simulate --json``, and what its terminal summary is printed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.config import Workload
from placement.elastic import Elastic
from placement.policies import DEFAULT_POLICY
from planner.intent import Slo
from traces.outcomes import Outcomes
from traces.simulator.result import Change, ChangeKind, DeploymentFigures, GpuFigures, SimulationResult
from traces.simulator.scenario import Service
from traces.summary import Summary, summarize
from traces.timeline import Bin, CurvePoint, curve, timeline

__all__ = [
    "DeploymentOutcome",
    "LatencyCurves",
    "SimulationDocument",
    "devices_told",
    "late_words",
    "simulation_document",
    "steering_words",
]

_GROWING = 10  # waiting at the last arrival, of one deployment: below, it is nothing to speak of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentOutcome:
    """One deployment: what came, and how it was served. ``summary`` is None where nothing came."""

    name: str
    replicas: int  # as the last request of the trace arrived, as the next four
    waiting: int
    most_replicas: int  # at once
    wakes: int  # from nothing, by a request
    asleep_s: float  # scaled to nothing
    moves: int  # replicas that went to other GPUs
    summary: Summary | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyCurves:
    """Quantiles of one deployment's completed requests, from their arrival."""

    name: str
    ttft: tuple[CurvePoint, ...]
    e2e: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationDocument:
    """What was simulated, and what came of it."""

    trace: str
    hardware: str
    service: Service
    refuses_late: bool  # requests that could not keep the SLO any more
    forecasts_late: bool  # ... by what iServe's gateway knows when they come; else by exact times at their turn
    planner: str  # who decided what was deployed
    placement: str  # iServe's policy for where
    steering: Elastic | None  # what could change once it ran; None: nothing
    workload: Workload  # what deployments were planned for
    times: tuple[str, ...]  # of each model: where its step times are from
    end_s: float
    stopped: str | None
    gpu_hours: float  # of GPUs that held anything
    summary: Summary
    deployments: tuple[DeploymentOutcome, ...]
    changes: tuple[Change, ...]
    gpus: tuple[GpuFigures, ...]
    timeline: tuple[Bin, ...]
    curves: tuple[LatencyCurves, ...]  # of each deployment that was asked anything
    notes: tuple[str, ...]  # what the planner says of its decision, where that is not iServe's
    warnings: tuple[str, ...]


def simulation_document(
    result: SimulationResult,
    *,
    trace: str,
    hardware: str,
    service: Service,
    workload: Workload,
    times: tuple[str, ...],
    slo: Slo | None,
    refuses_late: bool = False,
    forecasts_late: bool = False,
    planner: str = "iserve",
    placement: str = DEFAULT_POLICY,
    steering: Elastic | None = None,
    notes: tuple[str, ...] = (),
) -> SimulationDocument:
    """The figures of ``result``, with ``slo`` judged on each request."""
    parts = dict(result.outcomes.by_deployment())
    moves = Counter(change.name for change in result.changes if change.kind is ChangeKind.MOVED)
    return SimulationDocument(
        trace=trace,
        hardware=hardware,
        service=service,
        refuses_late=refuses_late,
        forecasts_late=forecasts_late,
        planner=planner,
        placement=placement,
        steering=steering,
        workload=workload,
        times=times,
        end_s=result.end_s,
        stopped=result.stopped,
        gpu_hours=sum(gpu.held_fraction for gpu in result.gpus) * result.end_s / 3600,
        summary=summarize(result.outcomes, slo),
        deployments=tuple(
            DeploymentOutcome(
                name=figures.name,
                replicas=figures.replicas,
                waiting=figures.waiting,
                most_replicas=figures.most_replicas,
                wakes=figures.wakes,
                asleep_s=figures.asleep_s,
                moves=moves[figures.name],
                summary=summarize(parts[figures.name], slo) if figures.name in parts else None,
            )
            for figures in result.deployments
        ),
        changes=result.changes,
        gpus=result.gpus,
        timeline=timeline(result.outcomes),
        curves=tuple(_curves(name, part) for name, part in parts.items()),
        notes=notes,
        warnings=_warnings(result, workload),
    )


def _curves(name: str, outcomes: Outcomes) -> LatencyCurves:
    done = outcomes.select(outcomes.completed)
    return LatencyCurves(name=name, ttft=curve(done.ttft_s), e2e=curve(done.e2e_s))


def devices_told(device_ids: Sequence[str]) -> str:
    """``a6000:0-3, a6000:6`` for 0, 1, 2, 3 and 6: numbers in a row are told as one range."""
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


def late_words(document: SimulationDocument) -> str:
    """Of those who are refused, behind the service; empty: nobody is."""
    if not document.refuses_late:
        return ""
    return ", who is too late refused by forecast" if document.forecasts_late else ", who is too late refused"


def steering_words(steering: Elastic) -> str:
    """What could change once it ran, in a sentence's part."""
    said, scaling = [], steering.scaling
    if scaling is not None and scaling.min_replicas < scaling.max_replicas:
        said.append(f"{scaling.min_replicas} to {scaling.max_replicas} replicas by the load")
    if scaling is not None and scaling.idle_s is not None:
        said.append(f"none after {scaling.idle_s:g} s without a request")
    if steering.consolidates:
        said.append("consolidating")
    if steering.migration is not None:
        said.append("moving")
    return ", ".join(said)


def _warnings(result: SimulationResult, workload: Workload) -> tuple[str, ...]:
    outcomes = result.outcomes
    too_long = int((outcomes.asked_input_tokens + outcomes.asked_output_tokens > workload.context_tokens).sum())
    said = [] if result.stopped is None else [result.stopped]
    if too_long:
        said.append(
            f"{too_long} requests are longer than the {workload.context_tokens} tokens that deployments were "
            "planned for, and refused; make room for them with --context, or cut them with --cap-lengths"
        )
    never = [c.name for c in result.changes if c.kind is ChangeKind.REFUSED]
    placed = {c.name for c in result.changes if c.kind is ChangeKind.DEPLOYED}
    said += [f"{name} was never deployed" for name in dict.fromkeys(never) if name not in placed]
    if result.stopped is None:  # else the trace has not ended, and what waits too long is told
        said += [_grew(figures) for figures in result.deployments if _queue_grew(figures)]
    return tuple(said)


def _queue_grew(figures: DeploymentFigures) -> bool:
    return figures.waiting >= _GROWING and figures.waiting >= figures.arrived / 20


def _grew(figures: DeploymentFigures) -> str:
    return (
        f"{figures.waiting} of the {figures.arrived} requests of {figures.name} still waited as the trace ended: "
        "more comes than it serves, and in a longer trace they would wait longer"
    )
