"""Devices that a profile is taken on, and what of it fits next to the workers that are there.

An engine that is given a number of KV blocks makes them, so only its plan keeps it from memory that is promised to
other workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from daemon.status import DeviceStatus
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.depth_tied_cuts import tied_depths
from fingerprint.depth_tied_plan import DepthTiedPlan, Point
from fingerprint.errors import InfeasibleError
from fingerprint.estimates import StageMemory
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS, RooflineEstimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec

__all__ = ["STEP_TOKENS", "FittingPlan", "fitting", "has_room", "quietest", "share_of_free_bytes"]

# Of the largest step of a profiling worker; and of deployments on engines whose memory is counted for such a step.
STEP_TOKENS = DEFAULT_MAX_BATCHED_TOKENS

_SHARE_OF_FREE = 0.9  # of a device's memory, for a profiling worker
_GIB = 2**30


def quietest(devices: Iterable[DeviceStatus]) -> list[DeviceStatus]:
    """Return the least loaded and emptiest first, so that profiling uses what other workers leave."""
    return sorted(devices, key=lambda d: (d.load_fraction, -d.free_bytes, d.index))


def share_of_free_bytes(devices: Iterable[DeviceStatus]) -> int:
    """Return what a profiling worker may take of each of ``devices``: most of what the fullest has free of
    promises.
    """
    return int(min(device.free_bytes for device in devices) * _SHARE_OF_FREE)


def has_room(devices: Iterable[DeviceStatus], config: DeploymentConfig, need_bytes: int) -> bool:
    """Return whether a profiling worker of ``config`` may take so many bytes of each of its devices now."""
    used = quietest(devices)[: config.tp * config.pp]
    return len(used) == config.tp * config.pp and need_bytes <= share_of_free_bytes(used)


@dataclass(frozen=True, slots=True)
class FittingPlan:
    """Part of a plan that fits what is free now."""

    plan: DepthTiedPlan
    notes: tuple[str, ...]  # on each point that does not
    too_full: tuple[tuple[tuple[int, int], str], ...]  # each (tp, pp) that does not, and why
    dropped: tuple[Point, ...]  # points that do not
    dropped_bytes: int  # that the least of these takes of a GPU; 0: none was dropped
    largest_bytes: int  # that the largest of those that fit takes of a GPU


def fitting(plan: DepthTiedPlan, spec: ModelSpec, gpu: GpuSpec, devices: Sequence[DeviceStatus]) -> FittingPlan:
    """Return the points and degrees of ``plan`` that fit what ``devices`` have free now.

    Args:
        devices: in the order in which they are used: tp * pp of them from the first on.

    Raises:
        InfeasibleError: the first has room for none.
    """
    need = _need_bytes(plan, spec, gpu)
    limit = share_of_free_bytes(devices[:1])
    points = tuple(point for point in plan.points if need[point] <= limit)
    if not points:
        raise InfeasibleError(
            f"a profile needs {min(need.values()) / _GIB:.1f} GiB of a GPU, {limit / _GIB:.1f} GiB of what is "
            "free may be used; stop a worker there"
        )
    dropped = tuple(point for point in plan.points if point not in points)
    notes = tuple(
        f"batch {b} with {n} in left out: it needs {need[b, n] / _GIB:.1f} GiB of a GPU, a profile may use "
        f"{limit / _GIB:.1f} GiB now"
        for b, n in dropped
    )
    largest = max(need[point] for point in points)
    degrees, too_full = [], []
    for tp, pp in plan.degrees:
        room = share_of_free_bytes(devices[: tp * pp])
        if largest <= room:
            degrees.append((tp, pp))
        else:
            need_gib, room_gib = largest / _GIB, room / _GIB
            why = f"up to {need_gib:.1f} GiB of each GPU is needed, a profile may use {room_gib:.1f} GiB now"
            too_full.append(((tp, pp), why))
    kept = replace(
        plan,
        points=points,
        shallow_points=tuple(point for point in plan.shallow_points if point in points),
        degrees=tuple(degrees),
    )
    kept = replace(kept, max_context_tokens=min(plan.max_context_tokens, kept.kv_tokens))
    least = min((need[point] for point in dropped), default=0)
    return FittingPlan(kept, notes, tuple(too_full), dropped, least, largest)


def _need_bytes(plan: DepthTiedPlan, spec: ModelSpec, gpu: GpuSpec) -> dict[tuple[int, int], int]:
    """Return, by point, what the largest fingerprint takes on one GPU: by the roofline, with 16-bit weights."""
    deepest = max((k for _, pp in plan.degrees for k in tied_depths(spec, pp)), default=1)  # layers of a stage
    shapes = spec.layer_shape_indexes[:deepest]
    # Without windows: a sliding layer's blocks are made for all tokens.
    alike = replace(spec, num_layers=deepest, layer_windows=(), layer_shape_indexes=shapes)
    cut = RooflineEstimator(alike, gpu, max_batched_tokens=STEP_TOKENS)

    def stage(workload: Workload) -> StageMemory:
        return cut.estimate(DeploymentConfig(), workload).memory.stage(0, deepest)

    step = stage(Workload(1, STEP_TOKENS, 1))
    beside = step.total_bytes - step.kv_bytes
    return {(b, n): beside + stage(Workload(b, n, plan.long_output)).kv_bytes for b, n in plan.points}
