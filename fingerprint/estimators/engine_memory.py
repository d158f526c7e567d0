"""Memory of a whole model from what an engine counts of its own fingerprints, and the KV blocks that follow.

The engine items are weights, the peak of activations in the largest step it allows, what is outside its allocator
(CUDA context, communication buffers) and captured graphs. Activations and context do not grow with depth.
Weights grow by one layer at a time: by what the allocator takes for the tensors, because it counts small ones in
steps of 20 MiB, which times the number of layers is more than the error that is allowed. Where the two depths
differ in their mix of layers of several sizes (``depth_tied_cuts``), it grows from the deeper by those between.

One rank of a tensor-parallel group that was loaded alone has the group's weights, KV cache and activations; the
group's communication buffers are the roofline's assumption.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from fingerprint.cache_blocks import block_bytes, in_large_blocks, layer_kept_bytes
from fingerprint.config import DeploymentConfig, Pruning, WeightFormat, Workload, even_split
from fingerprint.engine_caches import with_engine_caches
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import MemoryEstimate, Source
from fingerprint.estimators.roofline import CALIBRATED
from fingerprint.gpu_spec import GpuSpec
from fingerprint.loaded_bytes import added_layer_bytes
from fingerprint.measurements import MeasuredKey, MemoryPoint, Profile, key_of
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import (
    embedding_bytes,
    kv_token_bytes_per_gpu,
    layer_weight_bytes_per_gpu,
    layers_per_block,
    linear_element_bytes,
    stage_weight_ratio,
)

__all__ = ["CountedMemory", "allocated_layer_bytes"]

# torch's CUDA allocator (c10/cuda/CUDACachingAllocator) rounds a block above the one size up to the other.
_LARGE_BYTES, _ROUND_BYTES = 10 * 2**20, 2 * 2**20
_ALLOCATOR_STEP_BYTES = 40 * 2**20  # two of vLLM's blocks: within this the sizes are believed, beyond it the count
# vLLM 0.24 on an H200 captured 0.27 to 0.37 GiB more for 32 and 36 layers than for one (three models).
_GRAPH_BYTES_PER_LAYER = 10 * 2**20
# What vLLM keeps free for graphs before it captures them: by its own estimate in 0.33, and for some models before.
# Of 11 recorded models it grew by 5 to 13 MB a layer, 8.4 in the mean; below the least it is a block's rounding.
_RESERVE_BYTES_PER_LAYER, _LEAST_RESERVE_BYTES = 8 * 2**20, 32 * 2**20
_DOUBTED = 0.25  # of a layer's sizes: by so much less, or twice as much, is another format
_LOGIT_BYTES = 6  # 16 bits and float32
_RELATIVE_ERROR = 0.01  # of the whole, for feasibility


class CountedMemory:
    """Memory of every configuration of which two depths were loaded. See the module's text.

    Args:
        profile: whose memory points carry the engine's own counts.
        max_batched_tokens: not used: the largest step is the recorded one, which deployments are started with.
    """

    name = "counted"
    warnings: tuple[str, ...] = ()

    def __init__(self, profile: Profile, *, max_batched_tokens: int = 0) -> None:
        self._spec = with_engine_caches(profile.spec, profile.memory)
        self._engine, self._gpu = profile.engine, profile.machine.device
        self._points: dict[MeasuredKey, list[MemoryPoint]] = {}
        for point in sorted(profile.memory, key=lambda p: p.shard):
            points = self._points.setdefault(point.key, [])
            if not point.shard or all(other.shard for other in points):  # the real group's counts come first
                points.append(point)

    @property
    def keys(self) -> tuple[MeasuredKey, ...]:
        """Configurations that were loaded."""
        return tuple(self._points)

    @property
    def measured(self) -> tuple[tuple[WeightFormat, int, int], ...]:
        """(weights, tp, pp) of every configuration that was loaded."""
        return tuple((key.weights, key.tp, key.pp) for key in self._points)

    def layer_kv_bytes(self, config: DeploymentConfig, workload: Workload) -> float:
        """Return one layer's KV on one GPU at the workload's end: as counted, else by the model's sizes."""
        points = self._points.get(key_of(config))
        if points:
            return self._kept_bytes(config, points, workload)
        everywhere = [point for of_one in self._points.values() for point in of_one]
        step_tokens, token_bytes = _largest_step(everywhere), kv_token_bytes_per_gpu(self._spec, config)
        return layer_kept_bytes(self._spec, config, workload, step_tokens, token_bytes)

    def memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        """Memory of ``config`` with KV for ``workload``.

        Raises:
            NotMeasuredError: the configuration was not loaded.
        """
        points = self.loaded(config)
        layer = self._layer_bytes(config, points)
        first, last = self._ends(config, points, layer)
        ranks = [rank for point in points for rank in point.ranks]
        activations = max(rank.activation_peak_bytes for rank in ranks)
        # Of one rank together: a pipeline's first stage has the most activations, a later one the most context.
        outside = max(rank.activation_peak_bytes + rank.runtime_bytes for rank in ranks) - activations
        estimate = MemoryEstimate(
            tp=config.tp,
            pp=config.pp,
            num_layers=self._spec.num_layers,
            layer_weight_bytes=math.ceil(layer * stage_weight_ratio(self._spec, config.pp)),
            layer_kv_bytes=math.ceil(self._kept_bytes(config, points, workload)),
            first_stage_bytes=math.ceil(first),
            last_stage_bytes=math.ceil(last),
            activation_bytes=activations + self._logits(points, workload),
            pp_buffer_bytes=max(rank.pp_buffer_bytes for rank in ranks),
            runtime_bytes=outside + self.graph_bytes(config),
            relative_error=_RELATIVE_ERROR,
            source=Source.EXTRAPOLATED,
        )
        doubt = self._layer_doubt_bytes(config, points) * max(even_split(estimate.num_layers, estimate.pp))
        held = estimate.per_gpu_bytes(even_split(estimate.num_layers, estimate.pp))
        estimate = replace(estimate, relative_error=_RELATIVE_ERROR + doubt / held)
        return self._of_a_group(estimate) if points[0].shard else estimate

    def _of_a_group(self, rank: MemoryEstimate) -> MemoryEstimate:
        """``rank``, counted alone, with the communication buffers of a group; half of them count as error."""
        added = CALIBRATED.collective_bytes if rank.pp == 1 else 0  # the stages of a pipeline have theirs already
        doubt = CALIBRATED.runtime_relative_error * CALIBRATED.collective_bytes
        held = rank.per_gpu_bytes(even_split(rank.num_layers, rank.pp)) + added
        return replace(
            rank,
            runtime_bytes=rank.runtime_bytes + added,
            relative_error=rank.relative_error + doubt / held,
            source=Source.SHARDED,
        )

    def kv_blocks(self, config: DeploymentConfig, budget_bytes: int) -> int:
        """Blocks that the engine will report when it may take ``budget_bytes`` of each GPU.

        ``(budget - weights - activations - context - reserve) // (layers * bytes of a block in one layer)``, of
        all stages the fewest; of layers of several kinds, as many layers as share a block. Graphs are captured
        after the blocks are made, so they do not count; what the engine keeps free for them does.

        Raises:
            NotMeasuredError: the configuration was not loaded.
        """
        points = self.loaded(config)
        estimate = self.memory(config, Workload())
        context = estimate.runtime_bytes - self.graph_bytes(config)
        fewest, first = [], 0
        for stage, layers in enumerate(even_split(self._spec.num_layers, config.pp)):
            held = estimate.stage(stage, layers).weights_bytes + estimate.activation_bytes + context
            page, shared = self._page(config, points, first, layers)
            room = budget_bytes - held - self._reserve_bytes(config, points, layers)
            fewest.append(max(0, math.floor(room / page) // shared))
            first += layers
        return min(fewest)

    def _reserve_bytes(self, config: DeploymentConfig, points: list[MemoryPoint], layers: int) -> float:
        """Return the bytes of a GPU with so many layers that the engine keeps free of blocks."""
        deep = max(points, key=lambda point: point.num_layers)
        depth, kept = _layers_of(deep), [0.0]
        for rank in deep.ranks:
            if rank.kv_blocks and rank.budget_bytes:
                page, shared = self._page(config, points, rank.stage * depth, depth)
                held = rank.weights_bytes + rank.activation_peak_bytes + rank.runtime_bytes
                kept.append(rank.budget_bytes - held - rank.kv_blocks * shared * page)
        if max(kept) < _LEAST_RESERVE_BYTES:
            return 0.0
        return max(kept) + _RESERVE_BYTES_PER_LAYER * (layers - depth)

    def _page(
        self, config: DeploymentConfig, points: list[MemoryPoint], first: int, layers: int
    ) -> tuple[float, int]:
        """Return the bytes of a block in one layer, and the layers of a stage that share a block."""
        if in_large_blocks(self._spec, config.engine):
            return block_bytes(self._spec, config, first, layers), 1
        tokens = max(rank.kv_block_tokens for point in points for rank in point.ranks)
        shared = layers_per_block(self._spec.kept_by_layer[first : first + layers])
        return self._kv_bytes_per_token(points) * tokens, shared

    def loaded(self, config: DeploymentConfig) -> list[MemoryPoint]:
        """Return the memory counted of ``config``'s fingerprints: of the real group, else of one rank alone.

        Raises:
            NotMeasuredError: nothing was.
        """
        points = self._points.get(key_of(config))
        if not points or config.pruning is not Pruning.NONE or config.engine != self._engine:
            raise NotMeasuredError(f"the memory of {config} was not measured on {self._engine}")
        return points

    def graph_bytes(self, config: DeploymentConfig) -> int:
        """Return bytes of captured graphs on the GPU with the most layers (in ``memory``'s ``runtime_bytes``).

        Raises:
            NotMeasuredError: the configuration was not loaded.
        """
        return self._graph_bytes(self.loaded(config), max(even_split(self._spec.num_layers, config.pp)))

    def _layer_bytes(self, config: DeploymentConfig, points: list[MemoryPoint]) -> float:
        """Return the bytes of one layer's weights on one GPU, of layers of several sizes their mean."""
        stored = allocated_layer_bytes(self._spec, config, self._gpu)
        counted = _counted_layer_bytes(config, points)
        if self._sizes_differ(points):
            return stored
        return stored if counted is None or abs(counted - stored) <= _ALLOCATOR_STEP_BYTES else counted

    def _layer_doubt_bytes(self, config: DeploymentConfig, points: list[MemoryPoint]) -> float:
        """Return how many bytes a layer may be off where the allocator's steps could hide another format than was
        asked for: for a layer not large compared with the steps, the count may be right and the sizes wrong."""
        stored = allocated_layer_bytes(self._spec, config, self._gpu)
        counted = _counted_layer_bytes(config, points)
        off = 0.0 if counted is None else abs(counted - stored)
        return off if _DOUBTED * stored < off <= _ALLOCATOR_STEP_BYTES else 0.0

    def _ends(self, config: DeploymentConfig, points: list[MemoryPoint], layer: float) -> tuple[float, float]:
        """Return bytes on one GPU outside its layers: first stage, and last (0 where that is the first)."""
        last = config.pp - 1
        if self._sizes_differ(points):  # such cuts are of one stage
            deep = max(points, key=lambda point: point.num_layers)
            more = self._growth_bytes(config, points) * (self._spec.num_layers - deep.num_layers)
            both = max(0.0, _mean_weights(deep) + more - layer * self._spec.num_layers)
            first = min(both, embedding_bytes(self._spec) / config.tp)
            return first, both - first

        def beside(stage: int) -> float:
            seen = [
                rank.weights_bytes - layer * (point.num_layers // config.pp)
                for point in points
                for rank in point.ranks
                if rank.stage == stage
            ]
            return max(0.0, statistics.fmean(seen))

        if config.pp > 1:
            return beside(0), beside(last)
        both = beside(0)
        first = min(both, embedding_bytes(self._spec) / config.tp)
        return first, both - first

    def _sizes_differ(self, points: list[MemoryPoint]) -> bool:
        """Return whether the layers by which the depths differ are not as large as the model's in the mean."""
        depths = {point.num_layers for point in points}
        return len(depths) > 1 and self._layer_params(min(depths), max(depths)) != self._layer_params()

    def _layer_params(self, first: int = 0, end: int | None = None) -> float:
        """Return the parameters of one layer, in the mean of those from ``first`` on."""
        indexes, shapes = self._spec.layer_shape_indexes[first:end], self._spec.layer_shapes
        return statistics.fmean(shapes[index].params for index in indexes) if indexes else self._spec.layer_params

    def _growth_bytes(self, config: DeploymentConfig, points: list[MemoryPoint]) -> float:
        """Return the bytes of one of the layers between two depths: by its size, else as counted."""
        depths = [point.num_layers for point in points]
        share = self._layer_params(min(depths), max(depths)) / self._layer_params()
        stored = share * allocated_layer_bytes(self._spec, config, self._gpu)
        counted = _counted_layer_bytes(config, points)
        return stored if counted is None or abs(counted - stored) <= _ALLOCATOR_STEP_BYTES else counted

    def _kv_bytes_per_token(self, points: list[MemoryPoint]) -> float:
        """Return one layer's KV bytes per token on one GPU, as the engine allocated them."""
        seen = [
            rank.kv_bytes / (rank.kv_room_tokens * _layers_of(point))
            for point in points
            for rank in point.ranks
            if rank.kv_bytes and rank.kv_room_tokens
        ]
        if not seen:
            raise NotMeasuredError("the engine counted no KV cache")
        return statistics.median(seen)

    def _kept_bytes(self, config: DeploymentConfig, points: list[MemoryPoint], workload: Workload) -> float:
        """Return one layer's KV and states on one GPU: tokens as counted, states by the model's sizes."""
        token_bytes = 0.0 if in_large_blocks(self._spec, config.engine) else self._kv_bytes_per_token(points)
        return layer_kept_bytes(self._spec, config, workload, _largest_step(points), token_bytes)

    def _logits(self, points: list[MemoryPoint], workload: Workload) -> int:
        """Bytes of the logits of more sequences than the engine was started for when it was measured."""
        started_for = max(point.max_batch for point in points)
        more = max(0, workload.batch - started_for) if started_for else 0
        return more * self._spec.vocab_size * _LOGIT_BYTES

    def _graph_bytes(self, points: list[MemoryPoint], layers: int) -> int:
        shallow = min(points, key=lambda point: point.num_layers)
        captured = max(rank.graph_bytes for rank in shallow.ranks)
        return captured + _GRAPH_BYTES_PER_LAYER * (layers - _layers_of(shallow)) if captured else 0


def _counted_layer_bytes(config: DeploymentConfig, points: list[MemoryPoint]) -> float | None:
    """Return by how many bytes the count grows with a layer; None: one depth alone was counted."""
    by_depth = {point.num_layers // config.pp: _mean_weights(point) for point in points}
    if len(by_depth) < 2:
        return None
    shallow, deep = min(by_depth), max(by_depth)
    return (by_depth[deep] - by_depth[shallow]) / (deep - shallow)


def allocated_layer_bytes(spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> float:
    """Return bytes of one layer's weights on one GPU, large matrices rounded up as by torch's allocator.

    Engines join Q, K and V, and the two halves of a gated MLP, each into one matrix; all experts' are one.
    """
    held = layer_weight_bytes_per_gpu(spec, config) + added_layer_bytes(spec, config, gpu)
    if spec.layer_shapes or spec.kv_head_elements:  # these sizes do not determine which matrices there are
        return held
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inner = spec.intermediate_size * max(1, spec.num_experts) / config.tp
    rows = (
        queries / config.tp + 2 * keys / min(config.tp, spec.num_kv_heads),
        queries / config.tp,
        inner * (2 if spec.gated_mlp else 1),
        inner,
    )
    # Elements take whole or half bytes; scales and zero points are small tensors of their own.
    element_bytes = math.floor(2 * linear_element_bytes(spec, config.weights)) / 2
    sizes = (spec.hidden_size * count * element_bytes for count in rows)
    added = sum(-size % _ROUND_BYTES for size in sizes if size > _LARGE_BYTES)
    return held + added


def _largest_step(points: list[MemoryPoint]) -> int:
    """Tokens."""
    return max(point.max_batched_tokens for point in points)


def _layers_of(point: MemoryPoint) -> int:
    """Layers of one stage."""
    return point.num_layers // point.pp


def _mean_weights(point: MemoryPoint) -> float:
    return statistics.fmean(rank.weights_bytes for rank in point.ranks)
