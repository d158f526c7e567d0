"""Deployments that run, as a fleet has them: from what a snapshot of the cluster tells of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.fleet.types import FleetDeployment, FleetGpu, FleetReplica
from placement.types import ClusterSnapshot, DeploymentState, GpuState, Placement

__all__ = ["RunningFleet", "running_fleet"]

_WINDOW_S = 120.0  # over which rates are counted: of a younger deployment none is known


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningFleet:
    """Deployments of a cluster that stay as they are, their rates where these are known, and the GPUs."""

    deployments: tuple[FleetDeployment, ...]
    rates_per_s: tuple[float | None, ...]
    gpus: tuple[FleetGpu, ...]


def running_fleet(snapshot: ClusterSnapshot, *, usable_fraction: float, first: int) -> RunningFleet:
    """Return what runs on ``snapshot``.

    A deployment of which no service times are known is left out: what it holds is not free, and the busy share of
    its GPUs counts.

    Args:
        usable_fraction: part of a GPU's memory that deployments may take together.
        first: number of the first of these deployments in the fleet.
    """
    by_key = {(gpu.node_id, gpu.device_id): number for number, gpu in enumerate(snapshot.gpus)}
    here = [_part(state, by_key) for state in snapshot.deployments]
    known = [state for state in here if state.replicas and state.service is not None]
    held = {gpu for state in known for replica in state.replicas for gpu in _gpus(replica.placement, by_key)}
    gpus = tuple(
        _gpu(gpu, usable_fraction, busy=0.0 if number in held else gpu.load_fraction)
        for number, gpu in enumerate(snapshot.gpus)
    )
    return RunningFleet(
        deployments=tuple(_fixed(state, first + row, by_key) for row, state in enumerate(known)),
        rates_per_s=tuple(_rate(state) for state in known),
        gpus=gpus,
    )


def _gpu(gpu: GpuState, usable_fraction: float, busy: float) -> FleetGpu:
    return FleetGpu(
        node_id=gpu.node_id,
        device_id=gpu.device_id,
        gpu_index=gpu.gpu_index,
        usable_bytes=gpu.free_bytes - int((1 - usable_fraction) * gpu.total_bytes),
        total_bytes=gpu.total_bytes,
        busy=busy,
    )


def _part(state: DeploymentState, by_key: dict[tuple[str, str], int]) -> DeploymentState:
    """Return ``state`` with the replicas that lie on the snapshot's GPUs, and their part of its rates."""
    there = tuple(one for one in state.replicas if _keys(one.placement) <= by_key.keys())
    part = len(there) / max(1, len(state.replicas))
    planned = None if state.planned_rate_per_s is None else state.planned_rate_per_s * part
    return replace(state, replicas=there, requests_per_s=state.requests_per_s * part, planned_rate_per_s=planned)


def _keys(placement: Placement) -> set[tuple[str, str]]:
    return {(stage.node_id, device) for stage in placement.stages for device in stage.device_ids}


def _gpus(placement: Placement, by_key: dict[tuple[str, str], int]) -> tuple[int, ...]:
    """Return the numbers of a replica's GPUs."""
    return tuple(by_key[stage.node_id, device] for stage in placement.stages for device in stage.device_ids)


def _fixed(state: DeploymentState, number: int, by_key: dict[tuple[str, str], int]) -> FleetDeployment:
    service = state.service
    assert service is not None, "those without are left out"
    replicas = tuple(
        FleetReplica(
            number,
            0,
            _gpus(replica.placement, by_key),
            float(replica.kv_tokens or replica.max_batch * service.mean_tokens),
        )
        for replica in state.replicas
    )
    return FleetDeployment(name=state.name, options=(service,), fixed=replicas, most_replicas=len(replicas))


def _rate(state: DeploymentState) -> float | None:
    """Return the rate where it was counted for long enough, until then that of the plan."""
    return state.requests_per_s if state.steady_s >= _WINDOW_S else state.planned_rate_per_s
