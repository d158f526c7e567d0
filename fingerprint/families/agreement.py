"""Agreement of config.json and a checkpoint's headers, of a family that has a row: they are of one model, or an
error names both."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fingerprint.checkpoint import StoredTensor
from fingerprint.errors import CheckpointError
from fingerprint.families.base import Blueprint

__all__ = ["check_agreement"]

_WHOLE_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})  # the rest may be packed, whatever config.json says


def check_agreement(blueprint: Blueprint, layers: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Compare the number of layers, and the shape of each tensor that both have under one name.

    A checkpoint whose layers have another name is not judged, nor are shapes of what is quantized.

    Args:
        layers: name of the list of layers.
        tensors: of the whole checkpoint, as they are stored.

    Raises:
        CheckpointError: they differ.
    """
    indexed = re.compile(re.escape(layers) + r"\.(0|[1-9][0-9]{0,5})\..+")
    stored = {int(found[1]) for name in tensors if (found := indexed.fullmatch(name))}
    num_layers = blueprint.spec.num_layers
    if stored and stored != set(range(num_layers)):
        missing = next((index for index in range(num_layers) if index not in stored), None)
        has = "" if missing is None else f" and none of index {missing}"
        raise CheckpointError(
            f"config.json says {num_layers} layers, of the tensors {layers} has {len(stored)}{has}; one of them "
            "is wrong"
        )
    if blueprint.spec.stored is not None:
        return
    of_layers = [(f"{layers}.{index}.{t.name}", t.shape) for index in sorted(stored) for t in blueprint.layer]
    for name, shape in [*((t.name, t.shape) for t in blueprint.rest), *of_layers]:
        if name in tensors and tensors[name].dtype in _WHOLE_DTYPES and tensors[name].shape != shape:
            raise CheckpointError(
                f"config.json says that {name} is of {list(shape)}, its tensor is of {list(tensors[name].shape)}; "
                "one of them is of another model"
            )
