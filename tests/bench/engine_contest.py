"""Contest of plans on a real engine: what is settled before, what is recorded, and the arithmetic of both.

``tests.bench.engine_contest_run`` makes and plays a contest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fingerprint.config import DeploymentConfig
from traces.outcomes import Floats
from traces.simulator.step_model import Limits

__all__ = ["Answered", "Contest", "Figures", "Load", "PlacedReplica", "Plan", "Played", "figures", "table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedReplica:
    """Replica of a plan. ``devices``: indexes of its GPUs."""

    deployment: str
    config: DeploymentConfig
    devices: tuple[int, ...]
    bytes_per_gpu: int
    limits: Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan of one contestant. ``knows``: what of the load it was given."""

    contestant: str
    intent: str
    knows: str
    replicas: tuple[PlacedReplica, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Requests of one rate as they were answered, columns in the order of ``Load``; NaN is kept as -1."""

    rate_per_s: float
    sent_s: tuple[float, ...]
    first_s: tuple[float, ...]
    last_s: tuple[float, ...]
    output_tokens: tuple[int, ...]
    failures: tuple[tuple[str, int], ...] = ()
    late_s: float = 0.0  # most that the client was behind its schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests of one rate. ``alone_s``: end-to-end time of each alone, least TP that fits, by the roofline."""

    rate_per_s: float
    model: tuple[int, ...]
    at_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    alone_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Everything that ``decide`` settles before anything runs. ``simulated``: by contestant, of each rate."""

    world: str
    changes: tuple[str, ...]
    slo_multiple: float
    total_bytes: int  # of a GPU
    models: tuple[tuple[str, str], ...]  # name, text of config.json
    loads: tuple[Load, ...]
    plans: tuple[Plan, ...]
    simulated: dict[str, tuple[Answered, ...]]

    def plan(self, name: str) -> Plan:
        return next(plan for plan in self.plans if plan.contestant == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """Result of ``play``. ``start_s``: of each worker, from its start until it answered."""

    contestant: str
    date: str
    machine: str
    versions: str
    start_s: tuple[float, ...]
    gpu_used_mib: tuple[int, ...]
    answered: tuple[Answered, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of one plan at one rate. ``gpu_s``: per request, by the held share of each GPU."""

    p50_s: float
    p95_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    answered: float
    slo_kept: float
    gpu_s: float


def figures(contest: Contest, plan: Plan, load: Load, found: Answered) -> Figures:
    """Return the figures of what was answered, simulated or real, by one arithmetic."""
    at, first, last = (np.array(column) for column in (load.at_s, found.first_s, found.last_s))
    done = last >= 0
    e2e, ttft = np.where(done, last - at, np.inf), np.where(done, first - at, np.inf)
    kept = e2e <= contest.slo_multiple * np.array(load.alone_s)

    def at_share(values: Floats, share: float) -> float:
        return float(np.quantile(values, share, method="inverted_cdf"))

    return Figures(
        p50_s=at_share(e2e, 0.5),
        p95_s=at_share(e2e, 0.95),
        ttft_p50_s=at_share(ttft, 0.5),
        ttft_p95_s=at_share(ttft, 0.95),
        answered=float(done.mean()),
        slo_kept=float(kept.mean()),
        gpu_s=held_gpu_s(contest, plan, load, found) / max(1, int(done.sum())),
    )


def held_gpu_s(contest: Contest, plan: Plan, load: Load, found: Answered) -> float:
    """Return GPU x seconds held from the first request to the last answer.

    A GPU is held by the larger of a replica's reserved share and its busy share: of the moments in which it has
    requests, its part of the replicas that have some there. Where a deployment has several replicas, each is taken
    to be busy when any is.
    """
    names = [name for name, _ in contest.models]
    at, last, model = np.array(load.at_s), np.array(found.last_s), np.array(load.model)
    end_s = float(last.max())
    grid = np.linspace(0.0, end_s, 20_000)
    busy = {}
    for number, name in enumerate(names):
        own = (model == number) & (last >= 0)
        begun = np.searchsorted(np.sort(at[own]), grid, side="right")
        ended = np.searchsorted(np.sort(last[own]), grid, side="right")
        busy[name] = begun > ended
    total = 0.0
    for gpu in sorted({gpu for replica in plan.replicas for gpu in replica.devices}):
        here = [replica for replica in plan.replicas if gpu in replica.devices]
        at_work = np.maximum(1, sum(busy[replica.deployment].astype(int) for replica in here))
        for replica in here:
            share = float((busy[replica.deployment] / at_work).mean())
            total += max(share, replica.bytes_per_gpu / contest.total_bytes) * end_s
    return total


def table(contest: Contest, played: Sequence[Played]) -> str:
    """Return a Markdown table: each plan at each rate, on the engine and simulated."""
    lines = [
        "| requests/s | plan | P50 | simulated | P95 | simulated | TTFT P95 | simulated | SLOs kept | simulated "
        "| GPU x s | simulated |",
        "| ---: | --- |" + " ---: |" * 10,
    ]
    for number, load in enumerate(contest.loads):
        for one in played:
            plan = contest.plan(one.contestant)
            real = figures(contest, plan, load, one.answered[number])
            said = figures(contest, plan, load, contest.simulated[plan.contestant][number])
            cells = [
                (
                    f"{of.p50_s:.2f} s",
                    f"{of.p95_s:.2f} s",
                    f"{of.ttft_p95_s:.2f} s",
                    f"{of.slo_kept:.1%}",
                    f"{of.gpu_s:.3f}",
                )
                for of in (real, said)
            ]
            row = " | ".join(f"{here} | {there}" for here, there in zip(*cells, strict=True))
            lines.append(f"| {load.rate_per_s:g} | {plan.contestant} | {row} |")
    return "\n".join(lines)
