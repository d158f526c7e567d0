"""Construction of a ``ModelSpec`` from config.json and tensors: what layers and the ends hold and keep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from fingerprint.checkpoint import StoredTensor
from fingerprint.config_json import show
from fingerprint.description.facts import Facts
from fingerprint.description.mixers import QUERIES_ALONE, Kept, kept_of_layer
from fingerprint.description.packed import unpacked
from fingerprint.description.roles import role_of
from fingerprint.description.stack import Stack, check_tensors, find_stack
from fingerprint.description.stored import quantization_of, stored_as
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.model_spec import LayerShape, ModelSpec
from fingerprint.tensor_shapes import Role

__all__ = ["describe", "spec_and_stack"]

_WHOLE = re.compile(r"(^|\.)(q_a_proj|kv_a_proj_with_mqa|indexer\.(wq_b|wk|weights_proj))\.")


@dataclass(frozen=True, slots=True)
class _Layer:
    """Facts of one layer, as far as layers may differ."""

    shape: LayerShape
    kv_heads: int
    experts: int


@dataclass(frozen=True, slots=True)
class _Heads:
    """Attention heads of a layer."""

    heads: int
    head_dim: int
    kv_heads: int
    kv_elements: int  # of a token in each KV head


def describe(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """Return the model that ``config`` and the names, types and shapes of its tensors are of.

    Args:
        config: parsed config.json; of a multimodal model the part on text counts, its towers as parameters.
        tensors: of the whole checkpoint, as they are stored.

    Raises:
        ConfigError: a size is out of bounds, or contradicts the tensors.
        CheckpointError: the tensors are not those of as many layers, or packed in an unknown way.
        UnsupportedModelError: several stacks of layers, or a way of mixing tokens that is not known.
    """
    check_tensors(tensors)
    quantization = quantization_of(config)
    plain = unpacked(tensors, quantization)
    is_packed = any(each.is_packed for each in plain.values())
    if bool(quantization) != is_packed:
        said = f"quantized by {show(quantization.get('quant_method'))}" if quantization else "not quantized"
        has = "are in fewer bits than 16" if is_packed else "are all in 16 bits or more"
        raise ConfigError(f"config.json says that the model is {said}, its tensors {has}; one of them is wrong")
    if "num_experts_per_tok" in Facts(config).leaves_out:
        raise ConfigError("config.json says how many experts there are, and not num_experts_per_tok; add it")
    named = config.get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        raise ConfigError(f"architectures of config.json must name the model's class, got {show(named)}")
    stored = {name: each.tensor for name, each in plain.items()}
    spec, stack = spec_and_stack(config, stored, named[0], of_checkpoint=True)
    return replace(spec, stored=stored_as(quantization, stack, spec, plain)) if is_packed else spec


def spec_and_stack(
    config: Mapping[str, object],
    tensors: Mapping[str, StoredTensor],
    architecture: str,
    *,
    of_checkpoint: bool = False,
) -> tuple[ModelSpec, Stack]:
    """Return the model and its stack, of tensors in 16 bits. Raises as :func:`describe`.

    Args:
        of_checkpoint: whether the tensors are a checkpoint's own; those that a class made of ``config`` cannot
            contradict it, though the class may ignore some of its fields.
    """
    _check_one_stack(config)
    facts = Facts(config)
    num_layers = facts.num_layers
    stack = find_stack(tensors, num_layers, vocab=facts.vocab_size, width=facts.hidden_size)
    layers = _layers(stack, facts)
    _check_ends(stack, facts)
    if of_checkpoint:
        _check_heads(layers, facts)
    windows = facts.windows(num_layers)
    heads = _heads(max(layers, key=lambda layer: layer.shape.kv_elements), facts)
    shapes, shape_indexes = _distinct_shapes(layers, heads)
    several = len(set(windows)) > 1
    has_experts = any(layer.experts for layer in layers)
    vocab, hidden = stack.embedding.shape
    norms = min(stack.norm_params, stack.beside_params)
    spec = ModelSpec(
        family=facts.family,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=(facts.expert_inner if has_experts else None) or facts.inner or 4 * hidden,
        num_heads=heads.heads,
        num_kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        vocab_size=vocab,
        max_context_tokens=facts.max_context_tokens,
        tied_embeddings=stack.head is None,
        num_experts=max(layer.experts for layer in layers),
        experts_per_token=_per_token(layers, facts),
        sliding_window=None if several else windows[0],
        layer_windows=windows if several else (),
        gated_mlp=any("gate" in name or "up_proj" in name for name in stack.layers[-1]),
        layer_params=_mean(layer.shape.params for layer in layers),
        layer_linear_params=_mean(layer.shape.linear_params for layer in layers),
        layer_expert_params=_mean(layer.shape.expert_params for layer in layers),
        embedding_params=stack.beside_params - norms,
        head_params=0 if stack.head is None else prod(stack.head.shape),
        final_norm_params=norms,
        tower_params=stack.tower_params,
        tower_vector_params=stack.tower_vector_params,
        kv_head_elements=0 if heads.kv_elements == 2 * heads.head_dim else heads.kv_elements,
        layer_shapes=shapes,
        layer_shape_indexes=shape_indexes,
    )
    return spec, stack


def _check_one_stack(config: Mapping[str, object]) -> None:
    if config.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"{show(config.get('model_type'))} is an encoder-decoder model; one stack is served"
        )


def _distinct_shapes(layers: Sequence[_Layer], heads: _Heads) -> tuple[tuple[LayerShape, ...], tuple[int, ...]]:
    """Return the shapes of the layers, and the position of each layer's; none where the counts say it all."""
    places = {shape: place for place, shape in enumerate(dict.fromkeys(layer.shape for layer in layers))}
    first, *others = places
    keeps_kv_alone = not first.state_bytes and not first.kv_fp8_bytes
    if not others and keeps_kv_alone and first.kv_elements == heads.kv_heads * heads.kv_elements:
        return (), ()
    return tuple(places), tuple(places[layer.shape] for layer in layers)


def _mean(values: Iterable[int]) -> int:
    each = list(values)
    return round(sum(each) / len(each))


def _heads(most: _Layer, facts: Facts) -> _Heads:
    """Return the heads of the layers that keep most."""
    heads = facts.heads or most.kv_heads or 1
    head_dim = facts.head_dim or max(1, (facts.hidden_size or heads) // heads)
    if "latent attention" in most.shape.mixer:
        head_dim = facts.count("v_head_dim") or head_dim
    elements = most.shape.kv_elements
    if not elements:
        return _Heads(heads, head_dim, facts.kv_heads or heads, 2 * (facts.head_dim or 1))
    kv_heads = _whole_heads(elements, most.kv_heads)
    return _Heads(heads, head_dim, kv_heads, elements // kv_heads)


def _whole_heads(elements: int, heads: int) -> int:
    """Return ``heads``, or one where ``elements`` of a token are not of so many."""
    return heads if heads and elements % heads == 0 else 1


def _per_token(layers: Sequence[_Layer], facts: Facts) -> int:
    experts = max(layer.experts for layer in layers)
    if not experts:
        return 0
    if facts.experts_per_token == 0:  # not said: the most there can be
        return experts
    if not 1 <= facts.experts_per_token <= experts:
        raise ConfigError(
            f"the layers have {experts} experts; config.json says that {facts.experts_per_token} work on a token"
        )
    return facts.experts_per_token


def _layers(stack: Stack, facts: Facts) -> list[_Layer]:
    """Return the layers; those with equal tensors are looked at once."""
    seen: dict[tuple[tuple[str, tuple[int, ...]], ...], tuple[_Layer, Kept]] = {}
    found: list[_Layer] = []
    of_types = facts.layer_list("layers_block_type", facts.num_layers) or []
    first_shared = facts.num_layers - facts.shared_kv_layers
    for index, tensors in enumerate(stack.layers):
        key = tuple(sorted((name, tensor.shape) for name, tensor in tensors.items()))
        if key not in seen:
            shapes = dict(key)
            kept = kept_of_layer(shapes, facts)
            seen[key] = (_layer(shapes, kept, facts), kept)
        layer, kept = seen[key]
        if index >= first_shared and kept.kv_elements:
            mixer = f"{kept.mixer} to another layer's KV"
            shape = replace(
                layer.shape, mixer=mixer, kv_elements=0, kv_fp8_bytes=0, kv_read_elements=kept.kv_elements
            )
            layer = _Layer(shape, 0, layer.experts)
        found.append(layer)
    found = _with_what_is_looked_at(found)
    if "hybrid" in of_types:
        return _with_shared_attention(found, [kind == "hybrid" for kind in of_types])
    return found


def _with_what_is_looked_at(layers: list[_Layer]) -> list[_Layer]:
    """Let layers with queries alone look at as much as the other layers keep."""
    most = max((layer.shape for layer in layers), key=lambda shape: shape.kv_elements)

    def whole(layer: _Layer) -> _Layer:
        shape = layer.shape
        if not shape.mixer.startswith(QUERIES_ALONE) or shape.kv_read_elements:
            return layer
        read = replace(shape, kv_read_elements=most.kv_elements, kv_heads=most.kv_heads)
        return replace(layer, shape=read)

    return [whole(layer) for layer in layers]


def _with_shared_attention(layers: list[_Layer], attends: list[bool]) -> list[_Layer]:
    """Give KV to every layer that uses the block of attention that the first of them stores (Zamba)."""
    whole = max(layers, key=lambda layer: layer.shape.kv_elements)
    return [
        replace(
            layer,
            shape=replace(
                layer.shape,
                mixer=whole.shape.mixer,
                kv_elements=whole.shape.kv_elements,
                kv_heads=whole.shape.kv_heads,
                query_width=whole.shape.query_width,
            ),
            kv_heads=whole.kv_heads,
        )
        if uses
        else layer
        for layer, uses in zip(layers, attends, strict=True)
    ]


def _layer(tensors: Mapping[str, tuple[int, ...]], kept: Kept, facts: Facts) -> _Layer:
    roles = {name: role_of(name, shape, facts.num_experts) for name, shape in tensors.items()}
    experts = {name: shape for name, shape in tensors.items() if roles[name] is Role.EXPERT}
    linear = [shape for name, shape in tensors.items() if roles[name] is Role.LINEAR]
    shape = LayerShape(
        mixer=kept.mixer + (", experts" if experts else ""),
        params=sum(map(prod, tensors.values())),
        linear_params=sum(map(prod, [*experts.values(), *linear])),
        whole_params=sum(
            prod(tensors[name]) for name, role in roles.items() if role is Role.LINEAR and _is_whole(name)
        ),
        doubled_params=kept.doubled_params,
        expert_params=sum(map(prod, experts.values())),
        kv_elements=kept.kv_elements,
        kv_heads=_whole_heads(kept.kv_elements, kept.kv_heads) if kept.kv_elements else 0,
        query_width=kept.query_width,
        kv_fp8_bytes=kept.kv_fp8_bytes,
        state_bytes=kept.state_bytes,
        state_heads=kept.state_heads,
        state_group_bytes=kept.state_group_bytes,
        state_groups=kept.state_groups,
    )
    return _Layer(shape, kept.kv_heads, _num_experts(experts, facts.num_experts))


def _is_whole(name: str) -> bool:
    """Return whether vLLM gives every rank the matrix ``name``: those to latents, and of an indexer's choice.

    Those are ``ReplicatedLinear`` and ``disable_tp`` in ``models/deepseek_v2.py`` of vLLM 0.33.
    """
    return _WHOLE.search(name) is not None


def _num_experts(experts: Mapping[str, tuple[int, ...]], count: int) -> int:
    numbered = {found[0] for name in experts if (found := re.search(r"experts\.[0-9]+", name))}
    return len(numbered) or min(max((shape[0] for shape in experts.values()), default=0), count)


def _check_heads(layers: Sequence[_Layer], facts: Facts) -> None:
    """Refuse keys and values of another number of heads than is given; layers of several are not judged."""
    found = {layer.kv_heads for layer in layers if layer.shape.mixer.removesuffix(", experts") == "attention"}
    given = facts.given_kv_heads
    if given is not None and len(found) == 1 and (kv_heads := found.pop()) != given:
        raise ConfigError(
            f"config.json says {given} heads of K and V, their tensors have {kv_heads} of {facts.head_dim}; one "
            "of them is of another model"
        )


def _check_ends(stack: Stack, facts: Facts) -> None:
    """Refuse tensors whose ends contradict the config; vocabularies may be padded in the tensors."""
    vocab, hidden = stack.embedding.shape
    if facts.hidden_size is not None and hidden != facts.hidden_size:
        raise ConfigError(
            f"config.json says a hidden state of {facts.hidden_size}, the embedding's tensor has {hidden}; one of "
            "them is of another model"
        )
    if facts.vocab_size is not None and vocab < facts.vocab_size:
        raise ConfigError(
            f"config.json says {facts.vocab_size} tokens, the embedding's tensor has {vocab}; one of them is of "
            "another model"
        )
