"""Serving capacity across an update: what each worker serves before and after it, and where it would shrink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daemon.worker_spec import WorkerSpec
from iserve.planning.worker_launch import PlannedDeployment

__all__ = ["WorkerCapacity", "reduction", "tightest_device", "too_small"]

_GIB = 2**30

_NEARLY = 0.9  # of a capacity: free memory differs a little from GPU to GPU, and from one look to the next


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """Requests at once of one worker, tokens of the longest, and tokens of the KV cache of all workers."""

    requests_at_once: int
    context_tokens: int
    kv_tokens: int = 0  # 0: not known, or states alone

    @classmethod
    def of(cls, specs: Sequence[WorkerSpec]) -> WorkerCapacity:
        """Return that of a deployment's workers, which are alike; nothing where there is none."""
        limits = [spec.limits for spec in specs]
        return cls(
            min((one.max_batch for one in limits), default=0),
            min((one.max_context_tokens for one in limits), default=0),
            sum(one.kv_tokens for one in limits),
        )

    @classmethod
    def planned(cls, planned: PlannedDeployment) -> WorkerCapacity:
        """Return that of a plan; nothing where nothing is feasible."""
        served = planned.capacity
        if served is None:
            return cls(0, 0)
        each = served.workload.kv_tokens(served.engine)
        kv_tokens = sum(served.kv_tokens or (each,) * len(served.placements))
        return cls(served.workload.batch, served.workload.context_tokens, kv_tokens)

    def holds(self, least: WorkerCapacity) -> bool:
        """Return whether this capacity is at least ``least``, but for a few requests."""
        return self.share_of(least) >= _NEARLY

    def share_of(self, other: WorkerCapacity) -> float:
        """Return how much of ``other`` this is, in the dimension in which it is less."""
        return min(
            self.requests_at_once / max(1, other.requests_at_once),
            self.context_tokens / max(1, other.context_tokens),
            self.kv_tokens / other.kv_tokens if other.kv_tokens and self.kv_tokens else 1.0,
        )

    def at_most(self, most: WorkerCapacity) -> WorkerCapacity:
        return WorkerCapacity(
            min(self.requests_at_once, most.requests_at_once),
            min(self.context_tokens, most.context_tokens),
            min(self.kv_tokens, most.kv_tokens),
        )

    def __str__(self) -> str:
        requests = "1 request" if self.requests_at_once == 1 else f"{self.requests_at_once} requests"
        return f"{requests} at once of up to {self.context_tokens:,} tokens"


def reduction(before: WorkerCapacity, after: WorkerCapacity) -> str | None:
    """Return what becomes smaller, in words; None: nothing does."""
    if after.requests_at_once < before.requests_at_once or after.context_tokens < before.context_tokens:
        return f"each worker now serves {after}, before {before}"
    if after.kv_tokens and after.kv_tokens < _NEARLY * before.kv_tokens:
        return f"its KV cache holds {after.kv_tokens:,} tokens in all, before {before.kv_tokens:,}"
    return None


def too_small(present: Sequence[WorkerSpec], largest: WorkerCapacity, free_bytes: Mapping[str, int]) -> str:
    """Return why no new workers start next to the ``present`` ones, and what to change.

    Args:
        largest: what the new ones would serve there; nothing where they do not fit at all.
        free_bytes: by device.
    """
    old = "its present worker" if len(present) == 1 else "its present workers"
    free = f"at most {max(free_bytes.values(), default=0) / _GIB:.1f} GiB of a device are free next to {old}"
    stop = "let the present end first with --stop-first (stop_first), while requests wait"
    now = f"{old} serve{'s' if len(present) == 1 else ' each'} {WorkerCapacity.of(present)}"
    if not largest.requests_at_once:
        return f"{free}, and a new one does not fit there ({now}); {stop}"
    accept = f"--batch {largest.requests_at_once} --context {largest.context_tokens}"
    return (
        f"{free}, where a new one would serve {largest} ({now}); accept that with {accept} (batch, context_tokens)"
    )


def tightest_device(planned: PlannedDeployment) -> str | None:
    """Return the device with the least free memory among those that a plan would use; None: it uses none."""
    if planned.capacity is None:
        return None
    used = [
        device_id
        for placement in planned.capacity.placements
        for stage in placement.stages
        for device_id in stage.device_ids
    ]
    return min(used, key=lambda device_id: (planned.free_bytes[device_id], device_id))
