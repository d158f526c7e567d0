"""A worker's account from the iteration records of ``GET /metrics``, which gives each record to one reader only.

The endpoint answers a JSON list (keys: ``cpp/tensorrt_llm/executor/jsonSerialization.cpp``); an empty one says
that no iteration ended since the last look, or, as one report has it, nothing at all. It knows no HTTP.
"""

from __future__ import annotations

import msgspec

from daemon.worker_spec import WorkerSpec
from daemon.worker_stats import DeviceBusy, WorkerStats
from fingerprint.errors import EngineError

__all__ = ["Iterations"]


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
    """Documented keys that are read; all further ones are ignored."""

    latency_ms: float = msgspec.field(name="iterLatencyMS")
    active: int = msgspec.field(name="numActiveRequests")
    queued: int = msgspec.field(name="numQueuedRequests")
    kv: _Kv = msgspec.field(name="kvCacheStats")
    batch: _Batch = msgspec.field(name="inflightBatchingStats")


class Iterations:
    """Adds up what one worker reports, from its start on. Not thread-safe: one caller at a time."""

    def __init__(self) -> None:
        self._last: _Iteration | None = None
        self._busy_s = 0.0
        self._prompt_tokens = self._output_tokens = self._steps = 0

    def add(self, body: bytes) -> None:
        """Take in the records of one answer.

        Of tokens, one per decoding and per prefilling request is counted: a prompt that is taken in chunks counts
        one per chunk.

        Raises:
            EngineError: ``body`` is not what is documented; nothing of it is counted.
        """
        try:
            iterations = msgspec.json.decode(body, type=list[_Iteration])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(f"/metrics is not a list of iterations as documented: {error}") from error
        for iteration in iterations:
            batch = iteration.batch
            self._last = iteration
            if batch.scheduled > 0:
                self._steps += 1
                self._busy_s += iteration.latency_ms / 1e3
            self._prompt_tokens += batch.prompt_tokens
            self._output_tokens += batch.decoding + batch.prefilling

    def stats(self, spec: WorkerSpec, *, idle: bool) -> WorkerStats | None:
        """Return the account so far; None before the first iteration, of which alone the engine tells its KV room.

        Busy seconds are those of the whole worker, for each of its devices: the engine does not tell a pipeline's
        stages apart. Nor does it tell what each rank holds (``gpuMemUsage`` is everybody's on the device).

        Args:
            idle: nothing runs now. The last record is of a time when something did.
        """
        last = self._last
        if last is None:
            return None
        devices = dict.fromkeys(device_id for stage in spec.stages for device_id in stage.device_ids)
        free_blocks = last.kv.total_blocks if idle else last.kv.free_blocks  # what is cached for reuse can be had
        return WorkerStats(
            model=spec.served_model,
            running=0 if idle else last.active,
            waiting=0 if idle else last.queued,
            kv_tokens_total=last.kv.total_blocks * last.kv.tokens_per_block,
            kv_tokens_free=free_blocks * last.kv.tokens_per_block,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            steps=self._steps,
            busy=tuple(DeviceBusy(device_id=device_id, busy_s=self._busy_s) for device_id in devices),
            memory=(),
            kv_block_tokens=last.kv.tokens_per_block,
        )
