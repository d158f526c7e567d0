"""``iserve simulate --json``, and what its terminal summary is printed from."""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.config import Workload
from planner.intent import Slo
from traces.simulator.result import Change, ChangeKind, DeploymentFigures, GpuFigures, SimulationResult
from traces.simulator.scenario import Service
from traces.summary import Summary, summarize

__all__ = ["SimulationDocument", "simulation_document"]

_GROWING = 10  # waiting at the last arrival, of one deployment: below, it is nothing to speak of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentOutcome:
    """One deployment: what came, and how it was served. ``summary`` is None where nothing came."""

    name: str
    replicas: int  # at the end
    waiting: int  # as the last request of the trace arrived
    summary: Summary | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationDocument:
    """What was simulated, and what came of it."""

    trace: str
    hardware: str
    service: Service
    planner: str  # who decided what was deployed
    workload: Workload  # what deployments were planned for
    times: tuple[str, ...]  # of each model: where its step times are from
    end_s: float
    stopped: str | None
    summary: Summary
    deployments: tuple[DeploymentOutcome, ...]
    changes: tuple[Change, ...]
    gpus: tuple[GpuFigures, ...]
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
    planner: str = "iserve",
    notes: tuple[str, ...] = (),
) -> SimulationDocument:
    """The figures of ``result``, with ``slo`` judged on each request."""
    parts = dict(result.outcomes.by_deployment())
    return SimulationDocument(
        trace=trace,
        hardware=hardware,
        service=service,
        planner=planner,
        workload=workload,
        times=times,
        end_s=result.end_s,
        stopped=result.stopped,
        summary=summarize(result.outcomes, slo),
        deployments=tuple(
            DeploymentOutcome(
                name=figures.name,
                replicas=figures.replicas,
                waiting=figures.waiting,
                summary=summarize(parts[figures.name], slo) if figures.name in parts else None,
            )
            for figures in result.deployments
        ),
        changes=result.changes,
        gpus=result.gpus,
        notes=notes,
        warnings=_warnings(result, workload),
    )


def _warnings(result: SimulationResult, workload: Workload) -> tuple[str, ...]:
    outcomes = result.outcomes
    too_long = int((outcomes.asked_input_tokens + outcomes.asked_output_tokens > workload.context_tokens).sum())
    said = [] if result.stopped is None else [result.stopped]
    if too_long:
        said.append(
            f"{too_long} requests are longer than the {workload.context_tokens} tokens that deployments were "
            "planned for, and refused; raise --input-tokens or --output-tokens, or cut them with --cap-lengths"
        )
    never = [c.name for c in result.changes if c.kind is ChangeKind.REFUSED]
    placed = {c.name for c in result.changes if c.kind is ChangeKind.DEPLOYED}
    said += [f"{name} was never deployed" for name in dict.fromkeys(never) if name not in placed]
    said += [_grew(figures) for figures in result.deployments if _queue_grew(figures)]
    return tuple(said)


def _queue_grew(figures: DeploymentFigures) -> bool:
    return figures.waiting >= _GROWING and figures.waiting >= figures.arrived / 20


def _grew(figures: DeploymentFigures) -> str:
    return (
        f"{figures.waiting} of the {figures.arrived} requests of {figures.name} still waited as the trace ended: "
        "more comes than it serves, and in a longer trace they would wait longer"
    )
