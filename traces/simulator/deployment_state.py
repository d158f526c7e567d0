"""Deployments and how a policy sees them: replicas, their places, and the load of the last 120 s."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from placement.actions import Move
from placement.types import ClusterSnapshot, DeploymentState, Placement, ReplicaState
from planner.intent import Slo
from traces.simulator.admission import SimulatedAdmission
from traces.simulator.gpus import LOAD_WINDOW_S
from traces.simulator.kv_use import KvMeter
from traces.simulator.pipelined import PipelinedWorker
from traces.simulator.policy_errors import PolicyFault
from traces.simulator.requests import Requests
from traces.simulator.scenario import Deployed
from traces.simulator.step_model import StepModel
from traces.simulator.variant_traffic import VariantTraffic
from traces.simulator.workers import Server

__all__ = ["Deployment", "can_keep", "moved", "service_s", "snapshot_without", "states"]


@dataclass(slots=True)
class Deployment:
    """``queue``: rows that wait, in the order of their arrival, while every replica has as many as it may have."""

    index: int
    name: str
    model: str
    replicas: list[Server] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    missing: int = 0
    turn: int = 0
    arrived: int = 0
    at_zero: bool = False  # scaled to zero, not removed: requests wait for it
    draining: list[Server] = field(default_factory=list)
    coming: dict[Server, Server] = field(default_factory=dict)  # replacement that is loaded -> whom it replaces
    decided: dict[Server, Deployed] = field(default_factory=dict)
    latest: Deployed | None = None
    slots: int = 1  # of a replica
    born_s: float = 0.0
    since_s: float = 0.0  # the last change of its replicas
    last_s: float = 0.0  # the last arrival
    most: int = 0  # replicas at once
    cold_starts: int = 0
    scaled_to_zero_s: float = 0.0  # in all, up to the last cold start
    zero_since_s: float = 0.0
    kv_meters: list[KvMeter] = field(default_factory=list)  # of all its workers that had a bounded KV cache
    admission: SimulatedAdmission | None = None  # where late requests are rejected by forecast
    traffic: VariantTraffic | None = None  # where its workers have adapter slots

    @property
    def wanted(self) -> int:
        return len(self.replicas) + self.missing

    def scale_to_zero(self, now_s: float) -> None:
        """Record that the deployment was scaled to zero."""
        if not self.at_zero:
            self.at_zero, self.zero_since_s = True, now_s

    def leave_zero(self, now_s: float) -> None:
        """Record that the deployment has a replica again, or is not needed any more."""
        self.scaled_to_zero_s = self.at_zero_until_s(now_s)
        self.at_zero = False

    def at_zero_until_s(self, now_s: float) -> float:
        """Return the seconds scaled to zero, in all."""
        return self.scaled_to_zero_s + (now_s - self.zero_since_s if self.at_zero else 0.0)


def service_s(steps: StepModel, input_tokens: float, output_tokens: float, slots: int) -> float:
    """Return the seconds of a replica that a request of such a length takes while ``slots`` run at once.

    That is its prompt's time, and its share of the decode steps of all.
    """
    decode_s = steps.run_s(slots, input_tokens + 1, max(0, round(output_tokens) - 1))
    return steps.prompt_s(round(input_tokens)) + decode_s / slots


def moved(old: Deployed, action: Move, policy: str) -> Deployed:
    """Return ``old`` at the place of ``action``.

    Raises:
        PolicyFault: another shape, or a negative time.
    """
    shapes = [[(s.num_layers, len(s.device_ids)) for s in p.stages] for p in (old.placement, action.placement)]
    if shapes[0] != shapes[1]:
        raise PolicyFault(policy, f"ordered {action}; a replica keeps its layers per stage and its TP degree")
    if not action.load_s >= 0:
        raise PolicyFault(policy, f"ordered {action}; it takes a negative time")
    return replace(old, placement=action.placement)


def snapshot_without(snapshot: ClusterSnapshot, placements: Iterable[Placement]) -> ClusterSnapshot | None:
    """Return the snapshot without free memory on the GPUs of ``placements``; None: those are all GPUs."""
    theirs = {
        (stage.node_id, device) for placed in placements for stage in placed.stages for device in stage.device_ids
    }
    gpus = tuple(
        replace(gpu, free_bytes=0) if (gpu.node_id, gpu.device_id) in theirs else gpu for gpu in snapshot.gpus
    )
    taken = all((gpu.node_id, gpu.device_id) in theirs for gpu in snapshot.gpus)
    return None if taken else replace(snapshot, gpus=gpus)


_ROUNDING_S = 1e-9


def can_keep(slo: Slo, steps: StepModel, waited_s: float, input_tokens: int, output_tokens: int) -> bool:
    """Return whether a request that begins after ``waited_s`` keeps every limit, if none slows it from then on."""
    prompt_s, to_come = steps.prompt_s(input_tokens), output_tokens - 1
    decode_s = steps.run_s(1, input_tokens + 1, to_come)
    limits = (
        (waited_s + prompt_s, slo.ttft_s),
        (decode_s / to_come if to_come else 0.0, slo.tpot_s),
        (waited_s + prompt_s + decode_s, slo.e2e_s),
    )
    return all(limit_s is None or took_s <= limit_s + _ROUNDING_S for took_s, limit_s in limits)


def states(deployments: Iterable[Deployment], requests: Requests, now_s: float) -> tuple[DeploymentState, ...]:
    """Return the states of deployments that have, or are to have, replicas.

    ``service_s`` is that of the recent requests' mean lengths.
    """
    here = [d for d in deployments if d.latest is not None and (d.wanted or d.at_zero or d.coming)]
    if not here:
        return ()
    of, inputs, outputs = requests.recent(now_s - LOAD_WINDOW_S)
    most = max(d.index for d in here) + 1
    count, input_sum, output_sum = (
        np.bincount(of, weights, minlength=most).tolist() for weights in (None, inputs, outputs)
    )
    return tuple(_state(d, now_s, count[d.index], input_sum[d.index], output_sum[d.index]) for d in here)


def _state(d: Deployment, now_s: float, count: float, input_sum: float, output_sum: float) -> DeploymentState:
    assert d.latest is not None
    steps = d.latest.mean_steps or d.latest.steps
    longest = steps.limits.max_context_tokens
    each_s = 0.0
    if count:
        each_s = service_s(steps, min(input_sum / count, longest), output_sum / count, d.slots)
    window_s = min(LOAD_WINDOW_S, max(now_s - d.born_s, 1.0))
    busy = bool(d.queue) or any(server.outstanding for server in d.replicas)
    return DeploymentState(
        name=d.name,
        model=d.model,
        wanted=d.wanted,
        replicas=tuple(
            ReplicaState(
                replica_id=server.name,
                placement=d.decided[server].placement,
                ready=server.ready_s <= now_s,
                outstanding=server.outstanding,
                max_batch=server.max_batch,
                batches=len(server.stages) if isinstance(server, PipelinedWorker) else 1,
                kv_tokens=d.decided[server].steps.limits.kv_tokens,
            )
            for server in d.replicas
        ),
        moving=bool(d.coming),
        waiting=len(d.queue),
        requests_per_s=count / window_s,
        service_s=each_s,
        idle_s=0.0 if busy else now_s - d.last_s,
        steady_s=now_s - d.since_s,
        service=d.latest.service,
    )
