"""Checkpoints that are already quantized: what ``quantization_config`` of config.json says, and its bytes.

Nothing is converted: such a checkpoint is planned for, cut and served as it is stored. The layouts (the tests
write each and compare with its header):

* ``fp8``: a byte an element; a scale a matrix (float32), or one for each block (``weight_scale_inv``);
* ``compressed-tensors``: a byte an element and a scale a channel, or 4-bit in int32 words, scales and a shape;
* ``gptq``: 4 or 8 bits in int32 words, a 16-bit scale and a zero for each group and output, int32 ``g_idx``;
* ``awq``: the same without ``g_idx``;
* ``mxfp4``: the experts alone, 4 bits and a byte of scale for every 32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from fingerprint.config_json import show
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.model_spec import Stored
from fingerprint.tensor_shapes import Role, TensorShape

__all__ = ["ACTIVATION_ORDER", "ASYMMETRIC", "BY_HEADERS", "METHODS", "read_stored"]

METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
BY_HEADERS = ("modelopt",)  # whose bytes only the files themselves tell: NVFP4 and fp8 of ModelOpt
# Ends of a form's name: groups of inputs in the order of their activations, and GPTQ with zero points.
ACTIVATION_ORDER, ASYMMETRIC = ", in activation order", ", asymmetric"
_IGNORED_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers")
_MOST_PATTERNS = 256
_PLAIN_PATTERN = re.compile(r"(?:[\w^$|()-]|\\\.|\\d\+|\.\*?)+")  # what cannot be slow to match
_MOST_STARS = 4
_MX_GROUP = 32


class _Bytes(NamedTuple):
    """Bytes of one matrix in a file."""

    elements: float
    scales: float = 0.0
    zeros: float = 0.0
    indexes: float = 0.0
    rest: float = 0.0

    def in_part(self, share: float) -> _Bytes:
        return _Bytes(*(share * part for part in self))


_BytesOf = Callable[[TensorShape], _Bytes]
# Bits, in words, outputs and inputs that share a scale (0, -1: all inputs), and bytes of a matrix.
_Form = tuple[int, str, tuple[int, int], _BytesOf]


def read_stored(quantization: object, layer: Sequence[TensorShape], stack: str, num_layers: int) -> Stored | None:
    """Return how the linear matrices are stored; None: in 16 bits.

    Args:
        quantization: the field of config.json.
        layer: the tensors of a hidden layer, as they are in 16 bits; ``stack``: the name of the layers' list.

    Raises:
        ConfigError: a field that is missing or wrong.
        UnsupportedModelError: a method, or a setting of one, whose bytes are not known.
    """
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"quantization_config must be an object, got {show(quantization)}")
    method = quantization.get("quant_method")
    readers = {"fp8": _fp8, "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "mxfp4": _mxfp4}
    if not isinstance(method, str) or method not in readers:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {show(method)}; known are {', '.join(METHODS)}: give one of these, "
            "or the 16-bit model"
        )
    bits, form, (group_outputs, group_inputs), bytes_of = readers[method](quantization)
    matrices = [t for t in layer if t.role is Role.EXPERT or (t.role is Role.LINEAR and method != "mxfp4")]
    others = [t for t in layer if t.role is Role.LINEAR and method == "mxfp4"]
    if not matrices:
        raise ConfigError(f"quantization_config names {method}, which stores experts, and the model has none")
    left = _Ignored(quantization, matrices, stack, num_layers)

    def mean_bytes(tensors: Iterable[TensorShape]) -> _Bytes:
        """Sum over ``tensors``; what is left in 16 bits are elements."""
        total = _Bytes(0.0)
        for t in tensors:
            part, in_16_bits = bytes_of(t).in_part(1 - left.share(t)), left.share(t) * 2.0 * prod(t.shape)
            total = _Bytes(*map(sum, zip(total, part, _Bytes(in_16_bits), strict=True)))
        return total

    experts = mean_bytes(t for t in matrices if t.role is Role.EXPERT)
    linear = mean_bytes(t for t in matrices if t.role is Role.LINEAR)
    unquantized = sum(2.0 * prod(t.shape) for t in others)
    return Stored(
        method=method,
        form=form,
        bits=bits,
        group_inputs=max(0, group_inputs),
        group_outputs=group_outputs,
        layer_linear_bytes=sum(linear) + unquantized + sum(experts),
        layer_expert_bytes=sum(experts),
        layer_scale_bytes=linear.scales + experts.scales,
        layer_zero_bytes=linear.zeros,
        layer_index_bytes=linear.indexes + experts.indexes,
    )


class _Ignored:
    """Matrices that stay in 16 bits, as a share of the layers."""

    def __init__(
        self, quantization: Mapping[str, object], matrices: Sequence[TensorShape], stack: str, num_layers: int
    ) -> None:
        names = [_module(t) for t in matrices]
        prefixes: dict[str, list[str]] = {}
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                prefixes.setdefault(".".join(parts[:end]), []).append(name)
        self._num_layers = num_layers
        self._everywhere: set[str] = set()
        layers_of: dict[str, set[int]] = {}
        of_layer = re.compile(re.escape(stack) + r"\.(\d{1,5})(?:\.(.+))?")
        general = []
        for entry in _entries(quantization):
            found = of_layer.fullmatch(entry)
            if found is None:
                general.append(entry)
            elif int(found[1]) < num_layers:
                for name in prefixes.get(found[2] or "", ()) if found[2] else names:
                    layers_of.setdefault(name, set()).add(int(found[1]))
        if len(general) > _MOST_PATTERNS:
            raise UnsupportedModelError(
                f"quantization_config leaves out modules by {len(general)} names without a layer's number, "
                f"at most {_MOST_PATTERNS} are read"
            )
        tests = [_test(entry, stack) for entry in general]
        self._everywhere = {name for name in names if any(test(name) for test in tests)}
        self._layers_of = layers_of

    def share(self, tensor: TensorShape) -> float:
        name = _module(tensor)
        return 1.0 if name in self._everywhere else len(self._layers_of.get(name, ())) / self._num_layers


def _module(tensor: TensorShape) -> str:
    return tensor.name.removesuffix(".weight")


def _entries(quantization: Mapping[str, object]) -> list[str]:
    found: list[str] = []
    for key in _IGNORED_KEYS:
        value = quantization.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{key} of quantization_config must be a list of module names, got {show(value)}")
        found += value
    return found


def _test(entry: str, stack: str) -> Callable[[str], bool]:
    """Return a test of whether ``entry`` means a module, given the module's name within a layer.

    An entry means a module by its name, by the end of its name, or by a parent's.
    """
    if not entry.startswith("re:"):
        return lambda name: f".{entry}." in f".{stack}.*.{name}." or f".{entry}." in f".{stack}.0.{name}."
    pattern = entry[3:]
    if len(pattern) > 200 or not _PLAIN_PATTERN.fullmatch(pattern) or pattern.count("*") > _MOST_STARS:
        raise UnsupportedModelError(f"the pattern {show(entry)} of quantization_config is not one that is read")
    if re.search(r"layers\\?\.\(?\d", pattern):
        raise UnsupportedModelError(f"the pattern {show(entry)} of quantization_config tells layers apart")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the pattern {show(entry)} of quantization_config cannot be read: {error}") from error
    return lambda name: compiled.match(f"{stack}.0.{name}") is not None


def _rows(tensor: TensorShape) -> tuple[int, int]:
    """Return outputs, of all experts that are joined, and inputs."""
    if len(tensor.shape) == 3:
        experts, inputs, outputs = tensor.shape
        return experts * outputs, inputs
    return tensor.shape[0], tensor.shape[1]


def _number(quantization: Mapping[str, object], name: str, allowed: Sequence[int]) -> int:
    value = quantization.get(name)
    if type(value) is not int or value not in allowed:
        raise UnsupportedModelError(
            f"the checkpoint is quantized with {name}={show(value)}, which is not known; "
            f"known are {', '.join(map(str, allowed))}"
        )
    return value


_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)


def _fp8(quantization: Mapping[str, object]) -> _Form:
    block = quantization.get("weight_block_size")
    if block is None:
        static = quantization.get("activation_scheme") == "static"
        scales = 8.0 if static else 4.0
        return 8, "float, a scale per matrix", (1, 0), lambda t: _Bytes(prod(t.shape), scales)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(b) is int and 1 <= b <= 2**16 for b in block)
    ):
        raise ConfigError(f"weight_block_size of quantization_config must be two sizes, got {show(block)}")
    high, wide = (int(size) for size in block)

    def bytes_of(tensor: TensorShape) -> _Bytes:
        rows, inputs = _rows(tensor)
        return _Bytes(rows * inputs, 4.0 * math.ceil(rows / high) * math.ceil(inputs / wide))

    return 8, f"float, a scale per {high} x {wide}", (high, wide), bytes_of


def _packed(bits: int, group: int, *, zeros: bool, index: bool, more: float = 0.0) -> _BytesOf:
    def bytes_of(tensor: TensorShape) -> _Bytes:
        rows, inputs = _rows(tensor)
        scales = rows * (1 if group == -1 else -(-inputs // group))
        return _Bytes(
            rows * inputs * bits / 8,
            scales * 2.0,
            scales * bits / 8 if zeros else 0.0,
            4.0 * inputs if index else 0.0,
            more,
        )

    return bytes_of


def _gptq(quantization: Mapping[str, object]) -> _Form:
    bits, group = _number(quantization, "bits", (4, 8)), _number(quantization, "group_size", _GROUPS)
    for name in ("dynamic", "lm_head"):
        if quantization.get(name):
            raise UnsupportedModelError(f"{name} of quantization_config is not known to iServe")
    form = f"{bits}-bit, groups of {group}"
    if quantization.get("sym") is False:
        form += ASYMMETRIC
    if quantization.get("desc_act") is True and group != -1:
        form += ACTIVATION_ORDER
    return bits, form, (1, group), _packed(bits, group, zeros=True, index=True)


def _awq(quantization: Mapping[str, object]) -> _Form:
    name = "bits" if "bits" in quantization else "w_bit"
    size = "group_size" if "group_size" in quantization else "q_group_size"
    bits, group = _number(quantization, name, (4,)), _number(quantization, size, _GROUPS)
    zeros = quantization.get("zero_point", True)
    return (
        bits,
        f"{bits}-bit, groups of {group}",
        (1, group),
        _packed(bits, group, zeros=zeros is True, index=False),
    )


def _compressed(quantization: Mapping[str, object]) -> _Form:
    groups = quantization.get("config_groups")
    each = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(each) != 1 or not isinstance(each[0], Mapping) or not isinstance(each[0].get("weights"), Mapping):
        raise UnsupportedModelError(
            f"quantization_config has {len(each)} config_groups with weights; supported is one for all matrices"
        )
    (group,) = each
    if group.get("targets") != ["Linear"]:
        raise UnsupportedModelError(f"config_groups target {show(group.get('targets'))}; supported is ['Linear']")
    weights = group["weights"]
    form = group.get("format") or quantization.get("format")
    if form == "pack-quantized":
        bits, size = _number(weights, "num_bits", (4, 8)), _group_size(weights)
        by_order = weights.get("actorder") in ("group", "dynamic")
        packed = _packed(
            bits,
            size,
            zeros=weights.get("symmetric") is False,
            index=by_order,
            more=16.0,
        )
        return bits, f"{bits}-bit, groups of {size}{ACTIVATION_ORDER * by_order}", (1, size), packed
    kinds = {"float-quantized": ("float",), "int-quantized": ("int",), "naive-quantized": ("float", "int")}
    if form not in kinds:
        raise UnsupportedModelError(
            f"compressed-tensors format {show(form)} is not known; known are pack-quantized, {', '.join(kinds)}"
        )
    number = weights.get("type", "int")
    if number not in kinds[form]:
        raise UnsupportedModelError(
            f"weights of type {show(number)} in {form}; known are {' and '.join(kinds[form])}"
        )
    bits = _number(weights, "num_bits", (8,))
    strategy = weights.get("strategy")
    if strategy not in ("channel", "tensor"):
        raise UnsupportedModelError(f"weights of strategy {show(strategy)}; known are channel and tensor")
    per_channel = strategy == "channel"
    return (
        bits,
        f"{number}, a scale per {strategy}",
        (1, 0),
        lambda t: _Bytes(prod(t.shape), 2.0 * (_rows(t)[0] if per_channel else 1)),
    )


def _group_size(weights: Mapping[str, object]) -> int:
    if weights.get("strategy") == "channel":
        return -1
    return _number(weights, "group_size", _GROUPS)


def _mxfp4(quantization: Mapping[str, object]) -> _Form:
    def bytes_of(tensor: TensorShape) -> _Bytes:
        rows, inputs = _rows(tensor)
        return _Bytes(rows * inputs / 2, rows * math.ceil(inputs / _MX_GROUP))

    return 4, f"4-bit float, groups of {_MX_GROUP}", (1, _MX_GROUP), bytes_of
