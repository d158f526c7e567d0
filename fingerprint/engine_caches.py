"""Caches of layers as an engine itself specified them for fingerprints, in place of what config.json says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fingerprint.config import KvFormat
from fingerprint.measurements import LayerCache, MemoryPoint
from fingerprint.model_spec import KV_ELEMENT_BYTES, LayerShape, ModelSpec

__all__ = ["cache_differences", "caches_of_layers", "engine_caches", "with_caches", "with_engine_caches"]


def with_engine_caches(spec: ModelSpec, points: Iterable[MemoryPoint]) -> ModelSpec:
    """Return ``spec`` with the bytes of tokens and states that the engine gave its own fingerprints' layers."""
    return with_caches(spec, engine_caches(spec, points))


def engine_caches(spec: ModelSpec, points: Iterable[MemoryPoint]) -> tuple[LayerCache, ...]:
    """Return one layer's cache of each kind of layers of which the engine keeps something else than ``spec`` says.

    Points of one GPU in 16 bits count; other degrees and formats divide or convert what a layer keeps. A kind of
    layers that no fingerprint has, or whose layers differ on the engine, is left out.
    """
    return tuple(
        cache for kind, cache in sorted(_by_kind(spec, points).items()) if _kept(cache) != _planned(spec, kind)
    )


def with_caches(spec: ModelSpec, caches: Sequence[LayerCache]) -> ModelSpec:
    """Return ``spec`` with the caches of :func:`engine_caches`.

    A model whose layers are described alike stays as it is, unless all of them differ in the same way.
    """
    changed = {spec.kind_indexes[cache.layer]: cache for cache in caches if cache.layer < spec.num_layers}
    if not changed:
        return spec
    if spec.layer_shapes:
        return replace(spec, layer_shapes=_shapes(spec, changed))
    token_bytes = {cache.token_bytes for cache in changed.values()}
    if len(token_bytes) > 1 or len(changed) < len(spec.kinds) or any(c.state_bytes for c in changed.values()):
        return spec
    return replace(spec, kv_head_elements=round(token_bytes.pop() / _element_bytes() / spec.num_kv_heads))


def cache_differences(spec: ModelSpec, points: Iterable[MemoryPoint]) -> list[str]:
    """Return a line for each kind of layers of which the engine keeps something else than ``spec`` says."""
    lines = []
    for cache in engine_caches(spec, points):
        token_bytes, state_bytes = _planned(spec, spec.kind_indexes[cache.layer])
        lines.append(
            f"layer {cache.layer} keeps {cache.token_bytes:g} bytes of a token and {cache.state_bytes} of a "
            f"request by the engine, {token_bytes:g} and {state_bytes} by config.json: plans take the engine's"
        )
    return lines


def caches_of_layers(point: MemoryPoint) -> tuple[LayerCache, ...]:
    """Return one cache for each layer of a fingerprint, all that the layer keeps.

    A layer with attention and states side by side (Falcon-H1) has two in vLLM, which numbers those of the states
    from the model's number of layers on.
    """
    layers: dict[int, LayerCache] = {}
    for cache in (cache for rank in point.ranks for cache in rank.layer_caches):
        index = cache.layer % point.num_layers
        known = layers.get(index, LayerCache(layer=index, token_bytes=0.0, state_bytes=0, window=None))
        layers[index] = LayerCache(
            layer=index,
            token_bytes=known.token_bytes + cache.token_bytes,
            state_bytes=known.state_bytes + cache.state_bytes,
            window=known.window or cache.window,
        )
    return tuple(layers[index] for index in sorted(layers))


def _by_kind(spec: ModelSpec, points: Iterable[MemoryPoint]) -> dict[int, LayerCache]:
    """Return one layer's cache of each kind whose layers the engine gave alike."""
    kinds: dict[int, list[LayerCache]] = {}
    for point in points:
        if (point.tp, point.kv, point.shard) != (1, KvFormat.BITS16, False):
            continue
        for cache in caches_of_layers(point):
            if cache.layer < spec.num_layers:
                kinds.setdefault(spec.kind_indexes[cache.layer], []).append(cache)
    return {kind: caches[0] for kind, caches in kinds.items() if len(set(map(_kept, caches))) == 1}


def _kept(cache: LayerCache) -> tuple[int, int]:
    return round(cache.token_bytes), cache.state_bytes


def _planned(spec: ModelSpec, kind: int) -> tuple[int, int]:
    of_kind = spec.kinds[kind]
    elements, state_bytes = of_kind.kv_share * spec.kv_elements, 0
    if of_kind.shape is not None:
        elements, state_bytes = of_kind.shape.kv_elements, of_kind.shape.state_bytes
    return round(elements * _element_bytes()), state_bytes


def _shapes(spec: ModelSpec, changed: dict[int, LayerCache]) -> tuple[LayerShape, ...]:
    shapes: Sequence[LayerShape] = spec.layer_shapes
    of_shape = {spec.layer_shape_indexes[cache.layer]: cache for cache in changed.values()}
    return tuple(
        shape
        if (cache := of_shape.get(index)) is None
        else replace(
            shape,
            kv_elements=round(cache.token_bytes / _element_bytes()),
            state_bytes=cache.state_bytes,
            state_group_bytes=round(shape.state_group_bytes * cache.state_bytes / (shape.state_bytes or 1)),
        )
        for index, shape in enumerate(shapes)
    )


def _element_bytes() -> float:
    return KV_ELEMENT_BYTES[KvFormat.BITS16]
