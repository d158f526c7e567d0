"""Serving capacity of a deployment: requests at once, longest request, and the memory that both take. Pure.

A plan's figures are those of its workload, by default one request at a time. What the worker is started for is
larger unless it was given: as many and as long requests as a share of the free memory holds (docs/decisions/0024).
Ranking and placement never see it: they compare the planned workload.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fingerprint.cache_blocks import block_tokens, in_large_blocks
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator, MemoryEstimate
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import kept_bytes_per_replica, kv_token_bytes_per_gpu
from iserve.planning.document import CacheSizesDocument, CapacityBound, CapacityDocument
from iserve.planning.launch_limits import largest_step, unmeasured_step_tokens
from iserve.planning.pipeline import Hardware, PlanOptions, placements_of
from placement.fit import demand
from placement.types import GpuState, Placement, StagePlacement
from planner.costs import objective_of
from planner.plan import Plan

__all__ = [
    "ServingCapacity",
    "capacity_of",
    "kept_of",
    "promised_bytes",
    "served_memory",
    "serving_capacity",
]

_MEMORY_HEADROOM = (
    1.02  # a worker's limit over its estimate's upper bound, where there is room: allocator rounding
)

_MOST_REQUESTS = 256  # at once, where they share pages of the KV cache
_CONTEXT_TOKENS = 131_072  # of one request, for which the KV cache is made larger than for the planned ones
_MOST_SLOTS = 32  # requests at once, where each has a slot of its own, zeroed at the start
_SLOTS_TOKENS = 65_536  # of all slots together
_FEWEST_SLOTS = 8  # before slots are made longer
_GPU_KEPT_FREE = 0.05  # of a GPU's memory
_CPU_TAKEN = 0.5  # of what is free of a CPU's memory, which the whole machine shares
_PARTLY_EMPTY_TOKENS = 32  # of each request: two pages of vLLM (of layers with a window), one of TensorRT-LLM
_LOGIT_BYTES = _SCORE_BYTES = 6  # 16 bits and float32
_TOKENS_APART = 64  # of two sizes of the KV cache that are compared


@dataclass(frozen=True, slots=True)
class ServingCapacity:
    """Capacity that each worker of a plan's best candidate is started for."""

    engine: str
    workload: Workload  # the planned lengths, with the requests at once and the longest one that are served
    placements: tuple[Placement, ...]  # of each replica, with the memory that serving it takes
    bound: CapacityBound  # why it is no more
    kept: CacheSizesDocument  # by the model, of what it serves
    step_tokens: int  # of the largest step
    kv_tokens: tuple[int, ...] = ()  # of each replica; empty: those of the workload

    def document(self, free_bytes: Mapping[str, int]) -> CapacityDocument:
        """Return it with the memory that is promised where ``free_bytes`` are free by device."""
        stages = (stage for placement in self.placements for stage in placement.stages)
        return CapacityDocument(
            requests_at_once=self.workload.batch,
            context_tokens=self.workload.context_tokens,
            kv_tokens=min(self.kv_tokens or (self.workload.kv_tokens(self.engine),))
            if self.kept.kv_bytes_per_token
            else 0,
            cache_sizes=self.kept,
            step_tokens=self.step_tokens,
            memory_bytes_per_gpu=max(promised_bytes(stage, free_bytes) for stage in stages),
            bound=self.bound,
        )


def serving_capacity(
    plan: Plan,
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    options: PlanOptions,
    measured_step: int | None = None,
) -> ServingCapacity | None:
    """Return :func:`capacity_of` the best of ``plan``; None: nothing is feasible."""
    best = plan.best
    if best is None or best.layout is None:
        return None
    return capacity_of(best.config, placements_of(best.layout), spec, hardware, estimator, options, measured_step)


def capacity_of(
    config: DeploymentConfig,
    placements: tuple[Placement, ...],
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    options: PlanOptions,
    measured_step: int | None = None,
) -> ServingCapacity:
    """Return the most that ``config`` can serve at ``placements``, one of each replica, on ``hardware``.

    Where its share of the free memory holds no more than the planned workload, or nothing was measured that tells,
    it is that workload.

    Args:
        measured_step: tokens of the largest step that the engine was measured with, as ``launch_limits`` has it.
    """
    planned, options, bound = options.workload, _growing(options), _bound(options)
    room, kept = _room_by_device(hardware, options, config), kept_of(spec, config)

    def serving(served: Workload, there: tuple[Placement, ...]) -> ServingCapacity:
        step = largest_step(spec, config, planned, served, measured_step)
        return ServingCapacity(config.engine, served, there, bound, kept, step)

    def at(size: int) -> ServingCapacity | CapacityBound:
        served = _served(planned, size, options, config.engine, spec)
        if served == planned:
            return serving(planned, placements)
        try:
            memory = served_memory(spec, estimator, config, planned, served)
        except NotMeasuredError:
            return CapacityBound.NOT_MEASURED
        grown = tuple(_with_memory(placement, memory) for placement in placements)
        if not all(_fits(placement, room) for placement in grown):
            return CapacityBound.MEMORY
        return serving(served, grown)

    low, high = 0, _largest_size(planned, options, config.engine, spec)
    found = serving(planned, placements)
    while low < high:  # the largest that fits
        middle = (low + high + 1) // 2
        answer = at(middle)
        if isinstance(answer, CapacityBound):
            high, bound = middle - 1, answer  # the last refusal is of the smallest size that is too large
        else:
            low, found = middle, answer
    return replace(found, bound=bound)


def kept_of(spec: ModelSpec, config: DeploymentConfig) -> CacheSizesDocument:
    """Return the bytes that ``config`` keeps of a request, over all GPUs of a replica."""
    token_bytes, state_bytes = kept_bytes_per_replica(spec, config)
    return CacheSizesDocument(kv_bytes_per_token=round(token_bytes), state_bytes_per_request=round(state_bytes))


def _bound(options: PlanOptions) -> CapacityBound:
    """Return what bounds a capacity that memory does not bound."""
    if not (options.more_requests or options.longer_requests):
        return CapacityBound.GIVEN
    if objective_of(options.intent).spares_memory:
        return CapacityBound.INTENT
    if options.intent.rate_per_s is not None and options.more_requests:
        return CapacityBound.RATE
    return CapacityBound.LARGEST


def _growing(options: PlanOptions) -> PlanOptions:
    """Return ``options`` without what the intent rules out: more memory, or at a rate more requests."""
    grows = not objective_of(options.intent).spares_memory
    more_requests = grows and options.more_requests and options.intent.rate_per_s is None
    return replace(options, more_requests=more_requests, longer_requests=grows and options.longer_requests)


def promised_bytes(stage: StagePlacement, free_bytes: Mapping[str, int]) -> int:
    """Return what each GPU of ``stage`` may take, where ``free_bytes`` are free by device."""
    room_bytes = min(free_bytes[device_id] for device_id in stage.device_ids)
    return max(stage.bytes_per_gpu, min(int(stage.bytes_per_gpu * _MEMORY_HEADROOM), room_bytes))


def _largest_size(planned: Workload, options: PlanOptions, engine: str, spec: ModelSpec) -> int:
    """Return the largest cache that is tried, in steps of tokens; of states alone, in sequences."""
    if not (options.more_requests or options.longer_requests):
        return 0
    if not spec.keeps_tokens:
        return _MOST_REQUESTS
    if traits_of(engine).has_slots:
        return math.ceil(_SLOTS_TOKENS / _TOKENS_APART)
    usual = planned.input_tokens + planned.output_tokens
    batch = _MOST_REQUESTS if options.more_requests else planned.batch
    longest = _longest(spec) if options.longer_requests else planned.context_tokens
    return math.ceil(max(batch * usual, longest) / _TOKENS_APART)


def _longest(spec: ModelSpec) -> int:
    """Tokens."""
    return min(spec.max_context_tokens, _CONTEXT_TOKENS)


def _served(planned: Workload, size: int, options: PlanOptions, engine: str, spec: ModelSpec) -> Workload:
    """Return the workload that a cache of ``size`` serves; what was given stays, and never less than planned.

    Where a model keeps states alone, requests may be as long as any, and memory bounds how many there are.
    """
    slots, kv_tokens = traits_of(engine).has_slots, size * _TOKENS_APART
    usual, context, batch = planned.input_tokens + planned.output_tokens, planned.context_tokens, planned.batch
    if options.longer_requests:
        share = 1 if not slots else _FEWEST_SLOTS if options.more_requests else batch
        held = min(spec.max_context_tokens, kv_tokens // share) if spec.keeps_tokens else _longest(spec)
        context = max(context, held)
    if options.more_requests:
        most, each = (_MOST_SLOTS, context) if slots else (_MOST_REQUESTS, usual)
        batch = max(batch, min(most, kv_tokens // each if spec.keeps_tokens else size))
    return replace(planned, batch=batch, longest_tokens=context if context > usual else 0)


def _room_by_device(hardware: Hardware, options: PlanOptions, config: DeploymentConfig) -> Mapping[str, int]:
    """Return bytes of each device that a deployment may take for more than was planned.

    Where further deployments are expected, a device is divided among as many as it will hold.
    """
    on_cpu, gpus = hardware.gpu.is_cpu, hardware.snapshot.gpus
    sharing = max(1, math.ceil(options.expect * options.replicas * config.num_gpus / len(gpus)))
    part = _CPU_TAKEN if on_cpu else 1 - _GPU_KEPT_FREE

    def room_bytes(gpu: GpuState) -> int:
        left = part * gpu.free_bytes if on_cpu else gpu.free_bytes - _GPU_KEPT_FREE * gpu.total_bytes
        return int(min(left, part * gpu.total_bytes / sharing))

    return {gpu.device_id: room_bytes(gpu) for gpu in gpus}


def served_memory(
    spec: ModelSpec, estimator: Estimator, config: DeploymentConfig, planned: Workload, served: Workload
) -> MemoryEstimate:
    """Return the memory of ``config`` while it serves ``served``, its largest step included.

    An engine with slots runs steps no larger than were planned, so that a long prompt holds up no request:
    activations are those of such a step with logits and attention scores of the larger batch and context. Where
    requests share pages of the KV cache, the last pages of each are partly empty.
    """
    memory = estimator.estimate(config, served).memory
    if served == planned:
        return memory
    if traits_of(config.engine).has_slots:
        step_tokens = unmeasured_step_tokens(planned, config.engine, served)
        stepping = estimator.estimate(config, Workload(batch=1, input_tokens=step_tokens, output_tokens=1)).memory
        logits = served.batch * spec.vocab_size * _LOGIT_BYTES
        scores = math.ceil(spec.num_heads / config.tp) * step_tokens * served.context_tokens * _SCORE_BYTES
        return replace(
            stepping,
            layer_kv_bytes=memory.layer_kv_bytes,
            activation_bytes=stepping.activation_bytes + logits + scores,
        )
    if in_large_blocks(spec, config.engine):
        return memory  # which has them
    in_blocks = traits_of(config.engine).has_grouped_blocks
    empty_tokens = max(_PARTLY_EMPTY_TOKENS, block_tokens(spec) if in_blocks else 0)
    partly_empty = served.batch * empty_tokens * kv_token_bytes_per_gpu(spec, config)
    return replace(memory, layer_kv_bytes=memory.layer_kv_bytes + math.ceil(partly_empty))


def _with_memory(placement: Placement, memory: MemoryEstimate) -> Placement:
    """Return ``placement`` with the upper bound of ``memory`` in place of its own."""
    blocks = demand(memory)
    return Placement(
        tuple(
            replace(stage, bytes_per_gpu=blocks.stage_bytes(index, stage.num_layers))
            for index, stage in enumerate(placement.stages)
        )
    )


def _fits(placement: Placement, room: Mapping[str, int]) -> bool:
    taken: Counter[str] = Counter()
    for stage in placement.stages:
        for device_id in stage.device_ids:
            taken[device_id] += int(stage.bytes_per_gpu * _MEMORY_HEADROOM)
    return all(size_bytes <= room[device_id] for device_id, size_bytes in taken.items())
