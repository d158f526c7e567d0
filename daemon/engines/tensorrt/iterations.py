"""A worker's account from the iteration records of ``GET /metrics``, which gives each record to one reader only.

So the totals are kept here, per worker. The endpoint answers a JSON list (keys:
``cpp/tensorrt_llm/executor/jsonSerialization.cpp``); an empty one says that no iteration ended since the last
look, or, as one report has it, nothing at all. It knows neither HTTP nor how often it is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from daemon.engines.base import WorkerSpec
from daemon.worker_stats import DeviceBusy, WorkerStats
from fingerprint.errors import EngineError

__all__ = ["IterationReader"]

_MAX_WORKERS = 256  # whose totals are kept: more than ever run at once


class _Kv(msgspec.Struct, frozen=True):
    total_blocks: int = msgspec.field(name="maxNumBlocks")
    free_blocks: int = msgspec.field(name="freeNumBlocks")
    tokens_per_block: int = msgspec.field(name="tokensPerBlock")


class _Batch(msgspec.Struct, frozen=True):
    scheduled: int = msgspec.field(name="numScheduledRequests")
    prefilling: int = msgspec.field(name="numContextRequests")
    decoding: int = msgspec.field(name="numGenRequests")
    prompt_tokens: int = msgspec.field(name="numCtxTokens")


class _Iteration(msgspec.Struct, frozen=True):
    """The documented keys that are read; the others are left alone."""

    number: int = msgspec.field(name="iter")
    latency_ms: float = msgspec.field(name="iterLatencyMS")
    active: int = msgspec.field(name="numActiveRequests")
    queued: int = msgspec.field(name="numQueuedRequests")
    kv: _Kv = msgspec.field(name="kvCacheStats")
    batch: _Batch = msgspec.field(name="inflightBatchingStats")


@dataclass(slots=True)
class _Totals:
    """Of one worker, since it started or since this process first looked."""

    last: _Iteration
    busy_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0

    def add(self, iteration: _Iteration) -> None:
        """One token per decoding and per prefilling request: a prompt taken in chunks counts one per chunk."""
        batch = iteration.batch
        self.last = iteration
        if batch.scheduled > 0:
            self.steps += 1
            self.busy_s += iteration.latency_ms / 1e3
        self.prompt_tokens += batch.prompt_tokens
        self.output_tokens += batch.decoding + batch.prefilling


class IterationReader:
    """Adds up what each worker reports. Not thread-safe: one caller at a time."""

    def __init__(self) -> None:
        self._totals: OrderedDict[str, _Totals] = OrderedDict()

    def read(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        """The account after the records in ``body``.

        Busy seconds are those of the whole worker, for each of its devices: of a pipeline's stages the engine does
        not tell apart. What each rank holds is not told either (``gpuMemUsage`` is of everybody on the device).

        Raises:
            EngineError: ``body`` is not what is documented, or no iteration was ever reported: nothing is known.
        """
        try:
            iterations = msgspec.json.decode(body, type=list[_Iteration])
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"/metrics of worker {spec.worker_id} is not a list of iterations: {error}"
            ) from error
        for iteration in iterations:
            totals = self._totals.get(spec.worker_id)
            if totals is None or iteration.number <= totals.last.number:  # seen first, or started anew
                totals = self._totals[spec.worker_id] = _Totals(iteration)
            totals.add(iteration)
        if spec.worker_id not in self._totals:
            raise EngineError(f"worker {spec.worker_id} has reported no iteration yet")
        self._totals.move_to_end(spec.worker_id)
        while len(self._totals) > _MAX_WORKERS:
            self._totals.popitem(last=False)
        return self._stats(spec, went_on=bool(iterations))

    def _stats(self, spec: WorkerSpec, *, went_on: bool) -> WorkerStats:
        totals = self._totals[spec.worker_id]
        last = totals.last
        devices = dict.fromkeys(device_id for stage in spec.stages for device_id in stage.device_ids)
        return WorkerStats(
            model=spec.served_model,
            running=last.active if went_on else 0,  # a worker without iterations runs nothing
            waiting=last.queued if went_on else 0,
            kv_tokens_total=last.kv.total_blocks * last.kv.tokens_per_block,
            kv_tokens_free=last.kv.free_blocks * last.kv.tokens_per_block,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            steps=totals.steps,
            busy=tuple(DeviceBusy(device_id=device_id, busy_s=totals.busy_s) for device_id in devices),
            memory=(),
        )
