"""Tensors of a quantized checkpoint as what they are in 16 bits: names, shapes, and the bytes that they take.

A quantized matrix is stored as words that hold several elements, with scales, zero points and indexes as tensors
of their own. Layouts: GPTQ and AWQ (``qweight``), compressed-tensors (``weight_packed``), NVFP4 (bytes with two
elements each) and MXFP4 (``*_blocks`` of 32 elements in 16 bytes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from fingerprint.checkpoint import DTYPE_BITS, StoredTensor
from fingerprint.config_json import show
from fingerprint.errors import CheckpointError

__all__ = ["Unpacked", "unpacked"]

_BESIDE = re.compile(
    r"[._](weight_scale(_inv|_2)?|weight_global_scale|input_(global_)?scale|weight_zero_point|weight_shape|"
    r"weight_g_idx|scales|qzeros|g_idx|[kv]_scale|activation_scale)$"
)
_PACKED = (".qweight", ".weight_packed", "_blocks")
_WORD_BITS = 32
_WHOLE = frozenset({"F16", "BF16", "F32", "F64", "I32", "I64", "BOOL"})  # by themselves; words have a name


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Tensor as it is in 16 bits, and the bytes that it takes as it is stored."""

    tensor: StoredTensor
    stored_bytes: float  # its scales, zero points and indexes included
    is_packed: bool  # not in 16 bits or more


def unpacked(tensors: Mapping[str, StoredTensor], quantization: Mapping[str, object]) -> dict[str, Unpacked]:
    """Return the tensors that belong to no other, packed ones with the shapes that they have in 16 bits.

    Raises:
        CheckpointError: words of an unknown layout.
    """
    beside: dict[str, float] = {}
    found: dict[str, Unpacked] = {}
    for name, tensor in tensors.items():
        if (at := _BESIDE.search(name)) is not None:
            beside[name[: at.start()]] = beside.get(name[: at.start()], 0.0) + _bytes(tensor)
    for name, tensor in tensors.items():
        if _BESIDE.search(name) is not None:
            continue
        plain, shape = _plain(
            name.replace(".base_layer.", "."), tensor, quantization
        )  # next to adapters of its own
        added = beside.get(plain.removesuffix(".weight"), 0.0)
        is_packed = name.endswith(_PACKED) or tensor.dtype not in _WHOLE
        found[plain] = Unpacked(StoredTensor("BF16", shape), _bytes(tensor) + added, is_packed)
    return found


def _bytes(tensor: StoredTensor) -> float:
    return prod(tensor.shape) * DTYPE_BITS[tensor.dtype] / 8


def _plain(name: str, tensor: StoredTensor, quantization: Mapping[str, object]) -> tuple[str, tuple[int, ...]]:
    """Name and shape in 16 bits, outputs first."""
    shape = tensor.shape
    if name.endswith(".qweight") and len(shape) == 2:
        in_word = _in_word(name, quantization)
        words, other = (shape[1], shape[0]) if quantization.get("quant_method") == "awq" else (shape[0], shape[1])
        size = (words * in_word, other) if quantization.get("quant_method") == "awq" else (other, words * in_word)
        return name.removesuffix("qweight") + "weight", size
    if name.endswith(".weight_packed") and len(shape) >= 2:
        in_word = 2 if tensor.dtype == "U8" else _in_word(name, quantization)
        return name.removesuffix("_packed"), (*shape[:-1], shape[-1] * in_word)
    if name.endswith("_blocks") and len(shape) == 4:
        return name.removesuffix("_blocks"), (*shape[:2], shape[2] * shape[3] * 2)
    if name.endswith(".weight") and tensor.dtype == "U8" and len(shape) >= 2:
        return name, (*shape[:-1], shape[-1] * 2)
    return name, shape


def _in_word(name: str, quantization: Mapping[str, object]) -> int:
    """Elements in a word of 32 bits.

    Raises:
        CheckpointError: the config does not say it.
    """
    bits = quantization.get("bits", quantization.get("w_bit"))
    groups = quantization.get("config_groups")
    if isinstance(groups, Mapping) and bits is None:
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        bits = next((each.get("num_bits") for each in weights if isinstance(each, Mapping)), None)
    if type(bits) is not int or bits < 1 or _WORD_BITS % bits:
        raise CheckpointError(
            f"{name[:200]} holds words of several elements, and quantization_config says bits={show(bits)}; "
            "it needs the number of bits of one"
        )
    return _WORD_BITS // bits
