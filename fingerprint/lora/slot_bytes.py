"""Bytes that adapter slots take on a GPU: the factors A and B of every matrix of its layers, and those of deltas.

Counts only, from :class:`~fingerprint.model_spec.ModelSpec`. One side of each matrix of a layer is the hidden
state: the inputs of q, k, v, gate and up, the outputs of o and down. Tensor parallelism splits the other side
alone: the factor at the hidden state (A of the first kind, B of the second) is whole on every rank. Factors of
embeddings and output layer, where an engine keeps room for them, are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from fingerprint.config import DeploymentConfig
from fingerprint.delta.formats import FORMATS, delta_bytes
from fingerprint.delta.slots import buffer_bytes, delta_places, layer_place_bytes, other_place_bytes
from fingerprint.engines import traits_of
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import WEIGHT_16BIT_BYTES, kv_heads_per_gpu

__all__ = ["LEAST_RANK", "adapter_bytes", "adapter_tensors", "largest_delta_bytes", "reserved_bytes", "slot_bytes"]

LEAST_RANK = 1  # that slots for deltas alone are made for: vLLM makes adapter slots next to them in any case
_MORE_MATRICES = 3  # that linear parameters beyond those of attention and experts are divided among


def slot_bytes(spec: ModelSpec, config: DeploymentConfig, num_layers: int) -> int:
    """Return the bytes of one adapter of rank ``config.adapter_rank`` on a GPU that holds ``num_layers`` layers.

    Of a delta, where the slot is for one and that is larger: it is counted as whole on every GPU. A slot with a
    format for deltas holds an adapter and a delta.

    All experts are counted, though an adapter may update none; embeddings and output layer, where the engine has
    room for them, on every stage and for classes that keep none. Matrices between two narrow sides (those of
    latent attention) are counted as if one was the hidden state: for them this is an estimate.
    """
    if config.has_delta_slots:
        return _adapter_slot_bytes(spec, config, num_layers) + _place_bytes(spec, config, num_layers)
    return max(_adapter_slot_bytes(spec, config, num_layers), config.delta_mib << 20)


def _adapter_slot_bytes(spec: ModelSpec, config: DeploymentConfig, num_layers: int) -> int:
    if traits_of(config.engine).pages_adapters:
        return _paged_bytes(spec, config)
    sides = sum(spec.hidden_size + ceil(width) for width in _split_widths(spec, config.tp))
    has_vocabulary = traits_of(config.engine).slots_for_vocabulary
    of_vocabulary = 2 * (spec.vocab_size + spec.hidden_size) if has_vocabulary else 0
    rank = config.adapter_rank or LEAST_RANK * config.has_delta_slots
    return int(rank * (sides * num_layers + of_vocabulary) * WEIGHT_16BIT_BYTES)


def _paged_bytes(spec: ModelSpec, config: DeploymentConfig) -> int:
    """Return the bytes of pages for one adapter: whatever layers a GPU holds, those of all.

    A page is as wide as the narrowest matrix's two sides, and each matrix takes as many as the widest does.
    """
    sides = [spec.hidden_size + ceil(width) for width in _split_widths(spec, config.tp)]
    widest = ceil(max(sides) / min(sides)) * min(sides)
    return int(config.adapter_rank * spec.num_layers * len(sides) * widest * WEIGHT_16BIT_BYTES)


def _place_bytes(spec: ModelSpec, config: DeploymentConfig, num_layers: int) -> int:
    return num_layers * layer_place_bytes(spec, config) + other_place_bytes(spec, config)


def largest_delta_bytes(spec: ModelSpec, config: DeploymentConfig) -> int:
    """Return the bytes of the largest delta that slots of ``config`` hold; 0: they hold adapters alone."""
    if config.has_delta_slots:
        return delta_bytes(spec, FORMATS[config.delta_format])
    return config.delta_mib << 20


def adapter_bytes(spec: ModelSpec, rank: int) -> int:
    """Return the bytes of an adapter of ``rank`` that updates every matrix of every layer, as a file has them."""
    sides = sum(spec.hidden_size + ceil(width) for width in _split_widths(spec, 1))
    return int(rank * sides * spec.num_layers * WEIGHT_16BIT_BYTES)


def adapter_tensors(spec: ModelSpec) -> int:
    """Return the tensors of such an adapter: two for each matrix, those of every expert among them."""
    return 2 * sum(1 for _ in _split_widths(spec, 1)) * spec.num_layers


def reserved_bytes(spec: ModelSpec, config: DeploymentConfig, num_layers: int) -> int:
    """Return the bytes that a GPU with ``num_layers`` layers keeps for adapters and deltas; 0 without slots."""
    if config.has_delta_slots:
        adapters = config.adapter_slots * _adapter_slot_bytes(spec, config, num_layers)
        deltas = delta_places(config) * _place_bytes(spec, config, num_layers)
        return adapters + deltas + buffer_bytes(spec, config, num_layers)
    traits = traits_of(config.engine)
    on_gpu = config.loaded_adapters if traits.loads_on_gpu else config.adapter_slots
    read = config.loaded_adapters * adapter_bytes(spec, config.adapter_rank) if traits.pages_adapters else 0
    return on_gpu * slot_bytes(spec, config, num_layers) + read


def _split_widths(spec: ModelSpec, tp: int) -> Iterator[float]:
    """Yield, for each matrix of a layer, the rows or columns that one rank has of the side that is split."""
    heads = spec.num_heads * spec.head_dim / tp
    kv_heads = kv_heads_per_gpu(spec, tp) * spec.head_dim
    yield from (heads, kv_heads, kv_heads, heads)
    mlps = max(spec.num_experts, 1) * (3 if spec.gated_mlp else 2)
    yield from (spec.intermediate_size / tp for _ in range(mlps))
    known = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim + mlps * spec.intermediate_size
    rest = spec.layer_linear_params / spec.hidden_size - known  # shared experts, say
    if rest > 0:
        yield from (rest / _MORE_MATRICES / tp for _ in range(_MORE_MATRICES))
