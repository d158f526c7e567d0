"""A worker's own account of itself, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.codec import from_json
from fingerprint.errors import BadInputError, EngineError
from fingerprint.measurements import RankMemory

__all__ = ["DeviceBusy", "WorkerStats", "read_own_stats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBusy:
    """Seconds, since the worker started, in which it executed a step on a device."""

    device_id: str
    busy_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStats:
    """A worker's own account, engine-neutral."""

    model: str
    running: int
    waiting: int
    kv_tokens_total: int
    kv_tokens_free: int
    prompt_tokens: int  # totals since start
    output_tokens: int
    steps: int
    busy: tuple[DeviceBusy, ...]
    memory: tuple[RankMemory, ...]
    kv_block_tokens: int = 0  # of one block of the KV cache; 0: the engine has none, or does not say


def read_own_stats(worker_id: str, body: bytes) -> WorkerStats:
    """Return the answer of a worker whose ``GET /stats`` is ours.

    Raises:
        EngineError: it is no such account; names the worker.
    """
    try:
        return from_json(body, WorkerStats, what="stats")
    except BadInputError as error:
        raise EngineError(f"worker {worker_id}: {error}") from error
