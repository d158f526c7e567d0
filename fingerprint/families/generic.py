"""Families without a row of their own: read from transformers' own class, built on torch's meta device.

The class is instantiated from config.json without memory behind its tensors, which gives names, shapes and the
stack of layers; one forward pass there gives the shapes of K and V. Only classes that come with transformers are
used: code that a checkpoint brings is never run, nothing is downloaded. torch is imported when the first is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fingerprint.config_json import MAX_CONTEXT, MAX_VOCAB, Fields, show
from fingerprint.context_length import CONTEXT_KEYS, context_tokens
from fingerprint.description.transformers_class import (
    MAX_BUILT_LAYERS,
    NOT_TAKEN,
    check_buildable,
    without_advice,
)
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.extras import need_extra
from fingerprint.families.base import Blueprint, Ends, Family, ModuleLayout, blueprint_of
from fingerprint.families.sliding_window import Windows
from fingerprint.tensor_shapes import Role, TensorShape

__all__ = ["general_family"]

_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_INNER_KEYS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_KINDS = {"full_attention", "sliding_attention"}


def general_family(config: Mapping[str, object], name: str) -> Family | None:
    """Return the row that transformers' class of ``name`` amounts to for this config; None: it has no causal-LM
    class.

    Raises:
        ConfigError: the class refuses the sizes, or they are out of bounds.
        UnsupportedModelError: not one stack of equal layers with K and V of one shape.
        MissingExtraError: transformers or torch is not installed.
    """
    taken = {key: value for key, value in config.items() if key not in NOT_TAKEN and not key.startswith("_")}
    return _family(json.dumps(taken, sort_keys=True), name)


@lru_cache(maxsize=64)
def _family(text: str, name: str) -> Family | None:
    need_extra("torch", f"model_type {show(name)}, of which iServe has no table of its own,")
    import transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    architecture = CLASSES.get(name)
    if not isinstance(architecture, str) or getattr(transformers, architecture)._is_stateful:
        return None  # a stateful one (Mamba) keeps a state per sequence, not K and V per token
    if get_checkpoint_conversion_mapping(name):  # type: ignore[no-untyped-call]
        raise UnsupportedModelError(
            f"checkpoints of model_type {show(name)} name their tensors otherwise than transformers' class, "
            "and iServe has no table of that family"
        )
    fields = Fields(json.loads(text), name)
    model = _build(fields, text)
    layout = _layout(fields, model)
    described = _described(fields, model, layout, architecture)
    return Family((architecture,), layout, _LAYERS_KEYS, lambda _: described)


def _build(fields: Fields, text: str) -> Any:
    """Return the causal-LM model on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields.count(*_LAYERS_KEYS, most=MAX_BUILT_LAYERS)
    check_buildable(json.loads(text))

    def build() -> Any:
        config = AutoConfig.for_model(**json.loads(text))
        with torch.device("meta"), without_advice():
            return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=False
            ).eval()

    return _tried(fields, build, "cannot build a model from this config.json")


def _tried(fields: Fields, step: Callable[[], Any], what: str) -> Any:
    try:
        return step()
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"transformers' class of {fields.family} {what}: {line[:200]}") from error


def _layout(fields: Fields, model: Any) -> ModuleLayout:
    import torch

    num_layers = fields.count(*_LAYERS_KEYS)
    stacks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers and not _has_index(name)
    ]
    names = {id(module): name for name, module in model.named_modules()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if len(stacks) != 1 or None in ends:
        raise UnsupportedModelError(
            f"transformers' class of {fields.family} has {len(stacks)} stacks of {num_layers} layers between an "
            "embedding and a head; supported are models with one"
        )
    prefix = stacks[0] + "."
    alone = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]
    embedding, head = (names[id(module)] for module in ends)
    norms = {n.rpartition(".")[0] for n in alone} - {embedding, head}
    return ModuleLayout(stacks[0], (embedding,), tuple(sorted(norms)), head)


def _has_index(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _described(fields: Fields, model: Any, layout: ModuleLayout, architecture: str) -> Blueprint:
    layers = model.get_submodule(layout.layers)
    layer = _layer_tensors(layers[0])
    if any(tensor.role is Role.EXPERT for tensor in layer):
        raise UnsupportedModelError(f"{fields.family} has experts, and iServe has no table of that family")
    if any(_layer_tensors(other) != layer for other in layers):
        raise UnsupportedModelError(f"the layers of this {fields.family} model are not of one shape")
    kv_heads, head_dim = _kv_shape(fields, model)
    hidden = model.get_input_embeddings().weight.shape[1]
    inner = _first(model.config, _INNER_KEYS, fields, MAX_VOCAB, default=4 * hidden)
    if not any(width in (inner, 2 * inner) for tensor in layer for width in tensor.shape):
        raise UnsupportedModelError(f"no matrix of a {fields.family} layer is {inner} wide, the MLP's width")
    return blueprint_of(
        fields,
        architecture,
        layer,
        _ends(model, layout),
        num_layers=len(layers),
        intermediate_size=inner,
        num_heads=_first(model.config, ("num_attention_heads", "n_head", "n_heads"), fields, MAX_VOCAB),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=context_tokens(fields, default=_first(model.config, CONTEXT_KEYS, fields, MAX_CONTEXT)),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        layer_windows=_windows(fields, model.config, len(layers)),
        gated_mlp=any("gate" in t.name and t.role is Role.LINEAR for t in layer),
    )


def _first(config: Any, names: tuple[str, ...], fields: Fields, most: int, default: int | None = None) -> int:
    """Return the first of ``names`` that the class's config has, its defaults included."""
    found = {name: getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)}
    return Fields(found, fields.family).count(*list(found)[:1] or names[:1], default=default, most=most)


def _layer_tensors(layer: Any) -> list[TensorShape]:
    owners = {f"{name}.weight": module for name, module in layer.named_modules()}
    return [
        TensorShape(name, tuple(p.shape), _role(name, p.dim(), type(owners.get(name)).__name__))
        for name, p in layer.named_parameters()
    ]


def _role(name: str, dim: int, owner: str) -> Role:
    if dim == 1:
        return Role.NORM if name.endswith("weight") else Role.BIAS
    if dim == 3 or ".experts." in name:
        return Role.EXPERT
    return Role.LINEAR if owner in ("Linear", "Conv1D") else Role.ROUTER


def _ends(model: Any, layout: ModuleLayout) -> Ends:
    """Return the tensors outside the layers.

    In addition to the vocabulary's two matrices, tables (positions) go with the embedding, vectors with the norm.
    """
    embedding: list[TensorShape] = []
    ends = Ends(embedding=embedding, final_norm=[], head=[])
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name == f"{layout.embedding[0]}.weight":
            embedding.insert(0, TensorShape(name, shape, Role.EMBEDDING))
        elif name.startswith(layout.head + "."):
            ends.head.append(TensorShape(name, shape, Role.HEAD if len(shape) > 1 else Role.BIAS))
        elif not name.startswith(layout.layers + "."):
            role = Role.EMBEDDING if len(shape) > 1 else _role(name, 1, "")
            (embedding if role is Role.EMBEDDING else ends.final_norm).append(TensorShape(name, shape, role))
    return ends


def _kv_shape(fields: Fields, model: Any) -> tuple[int, int]:
    """Return KV heads and their width, of what one forward pass leaves in the cache."""
    import torch

    def run() -> list[tuple[int, ...]]:
        tokens = torch.zeros((1, 2), dtype=torch.long, device="meta")
        with torch.no_grad():
            layers = model(input_ids=tokens, use_cache=True).past_key_values.layers
        return [tuple(tensor.shape) for layer in layers for tensor in (layer.keys, layer.values)]

    shapes = set(_tried(fields, run, "keeps no K and V for each layer"))
    if len(shapes) != 1 or len(only := shapes.pop()) != 4:
        raise UnsupportedModelError(
            f"the layers of {fields.family} do not all keep K and V of one shape, which a KV cache is planned for"
        )
    return only[1], only[3]


def _windows(fields: Fields, config: Any, num_layers: int) -> Windows:
    """Return the windows by ``layer_types`` where the class has them.

    All other layers count as full, so that KV is never too small.
    """
    named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    types = named or ["full_attention"] * num_layers
    if set(types) - _KINDS:
        raise UnsupportedModelError(f"layers of {fields.family} are of the kinds {show(sorted(set(types)))}")
    window = getattr(config, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
