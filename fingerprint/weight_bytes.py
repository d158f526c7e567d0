"""Weight bytes of a model in each format, and how many of them each GPU holds.

Counts only, from :class:`~fingerprint.model_spec.ModelSpec`; nothing is loaded. Only the linear matrices of the
hidden layers change with the format: embedding, output head, norms, biases and routers stay 16-bit in every one.
Not included: allocator rounding, and what a kernel re-packs at load time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from fingerprint.config import DeploymentConfig, Pruning, WeightFormat, Workload, even_split
from fingerprint.engines import traits_of
from fingerprint.model_spec import LayerKind, ModelSpec

__all__ = [
    "DENSE_STORED",
    "GROUP_SIZE",
    "WEIGHT_16BIT_BYTES",
    "embedding_bytes",
    "expert_element_bytes",
    "head_bytes",
    "kept_bytes_per_replica",
    "kept_fraction",
    "kv_heads_per_gpu",
    "kv_read_shares",
    "kv_token_bytes_per_gpu",
    "kv_tokens_per_layer",
    "layer_state_bytes_per_gpu",
    "layer_weight_bytes",
    "layer_weight_bytes_per_gpu",
    "layers_per_block",
    "linear_element_bytes",
    "stage_weight_ratio",
]

WEIGHT_16BIT_BYTES = 2.0
GROUP_SIZE = 128  # int4 and gptq4: input elements that share one scale (design, section 4)
_SCALE_BYTES = 2.0  # a 16-bit scale
_ZERO_BYTES = 0.5  # gptq4 packs zero points at 4 bits
_INDEX_BYTES = 4.0  # gptq4's g_idx: one int32 per input feature of every matrix
_FP8_SCALE_BYTES = 4.0  # one fp32 scale per matrix, as in compressed-tensors and ModelOpt checkpoints

# 2:4 keeps 2 of 4 elements and a 2-bit position for each: (2 * 16 + 2 * 2) / (4 * 16) bits, the semi-structured
# layout of the sparse tensor cores.
# Kept as full matrices with zeros in them: unstructured 50%, 4:8, and 2:4 where the engine has no layout for it.
DENSE_STORED = frozenset({Pruning.NONE, Pruning.SPARSEGPT, Pruning.WANDA, Pruning.WANDA_4_8})
# Structured: whole heads and MLP channels go. The share of the layers' linear parameters that stays.
_LLM_PRUNER_KEPT = 0.75

_ALIKE = 1.5  # as vLLM's get_kv_cache_groups


class _Matrix(NamedTuple):
    inputs: int
    outputs: int
    copies: int


def _matrices(spec: ModelSpec) -> tuple[_Matrix, ...]:
    """Return the linear matrices of one layer as checkpoints spell them (fused ones count as their parts)."""
    if spec.layer_shapes or spec.kv_head_elements:  # not Llama's five: as if all read the hidden state
        return (_Matrix(spec.hidden_size, max(1, spec.layer_linear_params // spec.hidden_size), 1),)
    attention = spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    experts = max(spec.num_experts, 1)
    return (
        _Matrix(spec.hidden_size, attention, 1),
        _Matrix(spec.hidden_size, kv, 2),
        _Matrix(attention, spec.hidden_size, 1),
        _Matrix(spec.hidden_size, spec.intermediate_size, experts * (2 if spec.gated_mlp else 1)),
        _Matrix(spec.intermediate_size, spec.hidden_size, experts),
    )


def _matrix_bytes(matrix: _Matrix, weights: WeightFormat) -> float:
    inputs, outputs, copies = matrix
    elements = inputs * outputs
    groups = -(-inputs // GROUP_SIZE) * outputs
    match weights:
        case WeightFormat.BITS16 | WeightFormat.STORED:  # one that is not quantized holds 16 bits
            stored = elements * WEIGHT_16BIT_BYTES
        case WeightFormat.INT8:
            stored = elements + outputs * _SCALE_BYTES
        case WeightFormat.INT4:
            stored = elements / 2 + groups * _SCALE_BYTES
        case WeightFormat.GPTQ4:
            stored = elements / 2 + groups * (_SCALE_BYTES + _ZERO_BYTES) + inputs * _INDEX_BYTES
        case WeightFormat.FP8:
            stored = elements + _FP8_SCALE_BYTES
    return copies * stored


def linear_element_bytes(spec: ModelSpec, weights: WeightFormat) -> float:
    """Return the mean stored bytes of one linear weight element, its share of scales, zeros and indexes included.

    ``16bit`` 2; ``int8`` 1 and a 16-bit scale per output channel; ``int4`` symmetric, half a byte and a 16-bit
    scale per group of 128 inputs (4.125 bits); ``gptq4`` the same with 4-bit zeros and an int32 group index per
    input (4.156 bits and a little; the GPTQ checkpoint layout); ``fp8`` 1 and one scale per matrix; ``stored``
    what the checkpoint has, including matrices that it leaves in 16 bits.
    """
    if weights is WeightFormat.STORED and spec.stored is not None:
        return spec.stored.layer_linear_bytes / spec.layer_linear_params
    matrices = _matrices(spec)
    elements = sum(matrix.inputs * matrix.outputs * matrix.copies for matrix in matrices)
    return sum(_matrix_bytes(matrix, weights) for matrix in matrices) / elements


def expert_element_bytes(spec: ModelSpec, weights: WeightFormat) -> float:
    """Return the mean of the experts' elements alone, which a checkpoint may store otherwise than the rest."""
    if weights is WeightFormat.STORED and spec.stored is not None and spec.layer_expert_params:
        return spec.stored.layer_expert_bytes / spec.layer_expert_params
    return linear_element_bytes(spec, weights)


def kept_fraction(pruning: Pruning) -> float:
    """Return the share of linear weights still stored and multiplied; zeros in a dense matrix are so all the same.

    2:4 counts as dense: no engine here keeps it compressed.
    """
    return _LLM_PRUNER_KEPT if pruning is Pruning.LLM_PRUNER_25 else 1.0


def layer_weight_bytes(spec: ModelSpec, config: DeploymentConfig) -> float:
    """Return the bytes of one copy of one hidden layer, over all TP ranks when nothing is replicated."""
    linear = spec.layer_linear_params * linear_element_bytes(spec, config.weights)
    rest = (spec.layer_params - spec.layer_linear_params) * WEIGHT_16BIT_BYTES
    return linear * kept_fraction(config.pruning) + rest


def kv_heads_per_gpu(spec: ModelSpec, tp: int) -> float:
    """Return KV heads that one GPU has in a layer that keeps most of a token.

    Above ``num_kv_heads`` ranks they are replicated, never split.
    """
    return spec.num_kv_heads / min(tp, spec.num_kv_heads)


def kv_token_bytes_per_gpu(spec: ModelSpec, config: DeploymentConfig) -> float:
    """Return bytes of one token on one GPU, in a layer that keeps most of it there."""
    most = max(_kv_bytes_of_kinds(spec, config))  # 0: no layer keeps tokens
    return most or spec.kv_bytes_per_token_per_layer(config.kv) / min(config.tp, spec.num_kv_heads)


def kv_read_shares(spec: ModelSpec, config: DeploymentConfig) -> tuple[float, ...]:
    """Return what each kind of layer looks at of a token on one GPU, in :func:`kv_token_bytes_per_gpu`."""
    whole, most = spec.kv_bytes_per_token_per_layer(config.kv), kv_token_bytes_per_gpu(spec, config)
    return tuple(whole * kind.read_share / min(config.tp, spec.kv_heads_of(kind)) / most for kind in spec.kinds)


def _kv_bytes_of_kinds(spec: ModelSpec, config: DeploymentConfig) -> list[float]:
    """Return bytes of one token on one GPU in a layer of each kind: a rank has whole heads of it, at least one."""
    whole = spec.kv_bytes_per_token_per_layer(config.kv)
    return [whole * spec.kv_share(kind, config.kv) / min(config.tp, spec.kv_heads_of(kind)) for kind in spec.kinds]


def steps_in_flight(config: DeploymentConfig) -> int:
    """Return how many steps an engine schedules before the first of them has ended.

    vLLM schedules the next step while a stage runs one, and keeps the KV blocks of a sliding window for all of
    them: ``max_concurrent_batches`` of ``vllm/config/vllm.py`` (0.26 to 0.33) is at most ``pp + 1``; earlier
    releases keep one step's and need no more.
    """
    return config.pp + 1 if traits_of(config.engine).schedules_ahead else 1


def kv_tokens_per_layer(
    spec: ModelSpec, config: DeploymentConfig, workload: Workload, step_tokens: int = 0
) -> float:
    """Return tokens that one layer holds at the end of ``workload``: a sliding layer no more than its window.

    Each token of a layer that keeps less of it on a GPU than :func:`kv_token_bytes_per_gpu` counts as that share.

    Where the kinds of layers do not fall on all stages alike, it is the mean over the layers of the stage that
    holds most, of an even split. Where vLLM fills up a group of layers that share blocks, those count as full.

    Args:
        step_tokens: of the largest step, for a cache that keeps what a step computes until it has run, once for
            each step in flight (:func:`steps_in_flight`); 0: for one whose slots are written over.

    Raises:
        ConfigError: more stages than layers.
    """

    def held(kind: LayerKind, share: float) -> float:
        whole = workload.kv_tokens(config.engine)
        if kind.window is None:
            return share * whole
        in_flight = step_tokens * steps_in_flight(config)
        return share * min(whole, workload.batch * min(kind.window, workload.context_tokens) + in_flight)

    kinds, most = spec.kinds, kv_token_bytes_per_gpu(spec, config)
    token_bytes = _kv_bytes_of_kinds(spec, config)
    each = [held(kind, of_kind / most) for kind, of_kind in zip(kinds, token_bytes, strict=True)]
    windows = {kind.window for kind in kinds if kind.kv_share}
    if len(windows) < 2 or not traits_of(config.engine).has_grouped_blocks:
        return _mean_of_the_fullest_stage(spec, config.pp, each)
    caches = [(kind.window, kind.kv_share) for kind in kinds]  # kinds may differ in what they do not keep

    def in_whole_groups(stage: Sequence[int]) -> float:
        counts = Counter(caches[kind] for kind in stage if each[kind])
        group = layers_per_block(tuple(counts.elements())) if counts else 1
        tokens = {caches[kind]: each[kind] for kind in stage}
        return sum(-(-count // group) * group * tokens[cache] for cache, count in counts.items())

    return max(in_whole_groups(stage) / len(stage) for stage in _kinds_of_stages(spec, config.pp))


def layer_state_bytes_per_gpu(spec: ModelSpec, config: DeploymentConfig, sequences: int) -> float:
    """Return bytes that one layer of one GPU keeps of ``sequences`` whatever their length.

    It is a mean as that of :func:`kv_tokens_per_layer`. The heads of a state are divided among the TP ranks, their
    groups as far as there are as many.

    Raises:
        ConfigError: more stages than layers.
    """
    if not spec.keeps_state:
        return 0.0
    each = [kind.shape.state_bytes_of_rank(config.tp) * sequences if kind.shape else 0.0 for kind in spec.kinds]
    return _mean_of_the_fullest_stage(spec, config.pp, each)


def kept_bytes_per_replica(spec: ModelSpec, config: DeploymentConfig) -> tuple[float, float]:
    """Return the bytes of one token, and of one sequence whatever its length, on all GPUs and in all layers."""
    of_kinds = zip(spec.kinds, _kv_bytes_of_kinds(spec, config), strict=True)
    tokens = sum(kind.count * token_bytes for kind, token_bytes in of_kinds)
    states = sum(kind.count * kind.shape.state_bytes_of_rank(config.tp) for kind in spec.kinds if kind.shape)
    return config.tp * tokens, config.tp * states


def _mean_of_the_fullest_stage(spec: ModelSpec, pp: int, of_kinds: Sequence[float]) -> float:
    """Return the mean over the layers of the fullest stage of an even split; ``of_kinds``: for each kind."""
    if len(of_kinds) == 1:
        return of_kinds[0]
    return max(sum(of_kinds[kind] for kind in kinds) / len(kinds) for kinds in _kinds_of_stages(spec, pp))


def _kinds_of_stages(spec: ModelSpec, pp: int) -> list[tuple[int, ...]]:
    """Return the kind of each layer, by stage of an even split."""
    ends = list(accumulate(even_split(spec.num_layers, pp), initial=0))
    indexes = spec.kind_indexes
    return [indexes[first:end] for first, end in pairwise(ends)]


def layers_per_block(kept: Sequence[Hashable]) -> int:
    """Return layers of each group that shares one table of KV blocks, where an engine keeps such groups.

    As vLLM's get_kv_cache_groups: layers of several kinds share the blocks, in groups as large as the rarest kind
    (the commonest, where they are about as many), the last one filled up. Of layers all alike it is all of them.

    Args:
        kept: what tells the kinds apart, of the layers of one stage.
    """
    counts = Counter(kept).values()
    return max(counts) if max(counts) < _ALIKE * min(counts) else min(counts)


def layer_weight_bytes_per_gpu(spec: ModelSpec, config: DeploymentConfig) -> float:
    """Return bytes of one hidden layer on one GPU of the TP group.

    Linear matrices are divided by ``tp``; K and V projections by at most the KV heads of their layer; norms,
    biases, routers and projections to latents are on every rank (a column-parallel bias is in truth divided: under
    0.1% of a layer).
    """
    element_bytes = linear_element_bytes(spec, config.weights) * kept_fraction(config.pruning)
    dense_params = spec.layer_linear_params - spec.layer_expert_params
    made = _apart_params(spec, 1)
    apart = min(made, dense_params)
    apart_of_rank = apart * _apart_params(spec, config.tp) / (made or 1.0)
    rest = (spec.layer_params - spec.layer_linear_params) * WEIGHT_16BIT_BYTES
    split = (spec.layer_linear_params - apart) / config.tp + apart_of_rank
    if spec.stored is None or config.weights is not WeightFormat.STORED or not spec.layer_expert_params:
        return split * element_bytes + rest
    experts = spec.stored.layer_expert_bytes
    dense_bytes = (spec.stored.layer_linear_bytes - experts) / max(dense_params, 1)
    return (split - spec.layer_expert_params / config.tp) * dense_bytes + experts / config.tp + rest


def stage_weight_ratio(spec: ModelSpec, pp: int) -> float:
    """Return what a layer of the heaviest stage weighs, of an even split, over the mean layer of the model.

    Raises:
        ConfigError: more stages than layers.
    """
    if pp == 1 or not spec.layer_shapes:
        return 1.0
    params = [kind.shape.params if kind.shape else spec.layer_params for kind in spec.kinds]
    return _mean_of_the_fullest_stage(spec, pp, params) * spec.num_layers / spec.layers_params


def _apart_params(spec: ModelSpec, tp: int) -> float:
    """Return the parameters that one of ``tp`` ranks has of matrices not simply divided, in the mean layer.

    They are K's and V's, whose heads are never split, or what every rank has whole.
    """

    def of_rank(kind: LayerKind) -> float:
        if kind.shape is not None and kind.shape.whole_params:
            return kind.shape.whole_params
        return spec.hidden_size * kind.kv_share * spec.kv_elements / min(tp, spec.kv_heads_of(kind))

    return sum(kind.count * of_rank(kind) for kind in spec.kinds) / spec.num_layers


def embedding_bytes(spec: ModelSpec) -> float:
    """Return bytes of the input embedding over all TP ranks: 16-bit in every format."""
    return spec.embedding_params * WEIGHT_16BIT_BYTES


def head_bytes(spec: ModelSpec) -> float:
    """Return the bytes of the output head over all TP ranks.

    A tied head is the input embedding's matrix: the same bytes, held once where the first stage is also the last,
    and a second time where it is not.
    """
    params = spec.vocab_size * spec.hidden_size if spec.tied_embeddings else spec.head_params
    return params * WEIGHT_16BIT_BYTES
