"""Storage of a described model's matrices: bytes from headers, or by the method's rule from a config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from statistics import fmean

from fingerprint.checkpoint import StoredTensor
from fingerprint.description.facts import text_config
from fingerprint.description.packed import Unpacked
from fingerprint.description.roles import role_of
from fingerprint.description.stack import Stack
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.model_spec import ModelSpec, Stored
from fingerprint.quantized import read_stored
from fingerprint.tensor_shapes import Role, TensorShape

__all__ = ["quantization_of", "stored_as", "stored_by_rule"]

_MATRICES = (Role.LINEAR, Role.EXPERT)


def quantization_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """``quantization_config``, of the text part where it is there; empty for a model that is not quantized.

    Raises:
        ConfigError: it is no object.
    """
    found = text_config(config).get("quantization_config") or {}
    if not isinstance(found, Mapping):
        raise ConfigError("quantization_config of config.json must be an object")
    return found


def stored_as(
    quantization: Mapping[str, object], stack: Stack, spec: ModelSpec, plain: Mapping[str, Unpacked]
) -> Stored:
    """Return how the mean layer is stored, with the bytes that the headers have.

    Args:
        plain: by full name.
    """
    by_role = dict.fromkeys(_MATRICES, 0.0)
    for index, layer in enumerate(stack.layers):
        for name, tensor in layer.items():
            role = role_of(name, tensor.shape, spec.num_experts)
            if role in by_role:
                by_role[role] += plain[f"{stack.name}.{index}.{name}"].stored_bytes
    experts = by_role[Role.EXPERT] / spec.num_layers
    return replace(
        _form(quantization, stack, spec),
        layer_linear_bytes=by_role[Role.LINEAR] / spec.num_layers + experts,
        layer_expert_bytes=experts,
    )


def stored_by_rule(quantization: Mapping[str, object], stack: Stack, spec: ModelSpec) -> Stored:
    """Return how the mean layer is stored, with the bytes that the method takes for matrices of its shapes.

    Raises:
        ConfigError, UnsupportedModelError: as ``quantized.read_stored``.
    """
    seen: dict[tuple[TensorShape, ...], Stored] = {}
    each = []
    for layer in stack.layers:
        tensors = _shapes(layer, spec)
        if tensors not in seen:
            seen[tensors] = _of_layer(quantization, tensors, stack, spec)
        each.append(seen[tensors])
    most = max(each, key=lambda stored: stored.layer_linear_bytes)
    return replace(
        most,
        layer_linear_bytes=fmean(stored.layer_linear_bytes for stored in each),
        layer_expert_bytes=fmean(stored.layer_expert_bytes for stored in each),
        layer_scale_bytes=fmean(stored.layer_scale_bytes for stored in each),
        layer_zero_bytes=fmean(stored.layer_zero_bytes for stored in each),
        layer_index_bytes=fmean(stored.layer_index_bytes for stored in each),
    )


def _of_layer(
    quantization: Mapping[str, object], tensors: tuple[TensorShape, ...], stack: Stack, spec: ModelSpec
) -> Stored:
    """A layer without any matrix that the method stores is in 16 bits."""
    matrices = [tensor for tensor in tensors if tensor.role in _MATRICES]
    kinds = {tensor.role for tensor in matrices}
    if not kinds or (quantization.get("quant_method") == "mxfp4" and Role.EXPERT not in kinds):
        in_16_bits = 2.0 * sum(prod(tensor.shape) for tensor in matrices)
        return Stored(method=str(quantization.get("quant_method")), form="16 bits", bits=16,
                      layer_linear_bytes=in_16_bits, layer_expert_bytes=0.0)  # fmt: skip
    found = read_stored(quantization, tensors, stack.name, spec.num_layers)
    assert found is not None  # ``quantization`` is not empty
    return found


def _shapes(layer: Mapping[str, StoredTensor], spec: ModelSpec) -> tuple[TensorShape, ...]:
    return tuple(
        TensorShape(name, tensor.shape, role_of(name, tensor.shape, spec.num_experts))
        for name, tensor in sorted(layer.items())
    )


def _form(quantization: Mapping[str, object], stack: Stack, spec: ModelSpec) -> Stored:
    """Return the storage by the method's rule; for a form without a known rule, the method's name and bits."""
    try:
        return stored_by_rule(quantization, stack, spec)
    except (ConfigError, UnsupportedModelError):
        bits = quantization.get("bits")
        method = str(quantization.get("quant_method", "unknown"))
        return Stored(method=method, form="as its files have it", bits=bits if type(bits) is int else 4,
                      layer_linear_bytes=0.0, layer_expert_bytes=0.0)  # fmt: skip
