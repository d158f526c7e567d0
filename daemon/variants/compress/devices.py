"""Device that a compression computes on: its name, and the memory that it must have free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from daemon.variants.compress.calibration import CalibrationTokens
from daemon.variants.compress.model_parts import ModelParts
from daemon.variants.compress.pair import CheckpointPair
from daemon.variants.device_names import gpu_number
from fingerprint.errors import ConfigError, UnavailableError

__all__ = ["check_free", "clear_out_of_memory", "compute_device", "needed_device_bytes"]

_VALUE_BYTES = 32  # of a weight of the matrix that is compressed: base, change, codes, errors and copies
_VOCABULARY_BYTES = 20  # the same of embeddings and output layer, whose rows are solved in several parts
_MOMENT_BYTES = 28  # of a pair of its inputs: second moments, and their factor in float64
_LIVE_STATES, _LIVE_INPUTS = 4, 3  # of all tokens at once: hidden states, and inputs of the widest linear
_WORKSPACE_BYTES = 2**30  # CUDA's own, and an attention's


def compute_device(name: str) -> torch.device:
    """Return the device named ``cpu``, ``cuda`` (the first GPU) or ``cuda:N``.

    Raises:
        ConfigError: another name, there is no such GPU, or torch was installed without CUDA.
    """
    number, count = gpu_number(name), torch.cuda.device_count()
    if number is None:
        return torch.device("cpu")
    if not torch.cuda.is_available() or number >= count:
        here = f"torch {torch.__version__} finds {count} of them here"
        raise ConfigError(f"{name} is no GPU of this machine: {here}; without --device the CPU computes")
    return torch.device("cuda", number)


def needed_device_bytes(pair: CheckpointPair, parts: ModelParts, tokens: CalibrationTokens | None) -> int:
    """Return the bytes that a compression has on its device at most, an estimate from above."""
    layers = [[_shape(name, pair) for name in own.values()] for own in parts.layers]
    vocabulary = [_shape(name, pair) for name in (*parts.embeddings.values(), parts.head) if name]
    linears = [shape for own in layers for shape in own]
    hidden = parts.source.spec.hidden_size
    widest = max((inputs for _, inputs in linears), default=hidden)
    num_tokens = 0 if tokens is None else tokens.num_tokens
    largest = max((outputs * hidden for outputs, _ in vocabulary), default=0)
    of_layer = 4 * (max((sum(map(prod, own)) for own in layers), default=0) + largest)
    of_layer += _VALUE_BYTES * max(map(prod, linears), default=0) + _MOMENT_BYTES * widest**2
    of_layer += 4 * num_tokens * (_LIVE_STATES * hidden + _LIVE_INPUTS * widest)
    of_vocabulary = _VOCABULARY_BYTES * largest + _MOMENT_BYTES * hidden**2 + 4 * num_tokens * hidden
    return max(of_layer, of_vocabulary) + _WORKSPACE_BYTES


def check_free(device: torch.device, needed_bytes: int) -> None:
    """Raise UnavailableError unless a GPU has so many bytes free: what it serves keeps its memory."""
    if device.type == "cpu":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free < needed_bytes:
        raise UnavailableError(
            f"{device} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, and this compression needs up to "
            f"{needed_bytes / 2**30:.1f}; take a GPU that serves nothing, or the CPU: leave --device out"
        )


@contextmanager
def clear_out_of_memory(device: torch.device) -> Iterator[None]:
    """Raise UnavailableError where the device has no memory left within the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UnavailableError(
            f"{device} ran out of memory, which another process may have taken; what is done is kept: the same "
            "command goes on with it, on another GPU or, without --device, on the CPU"
        ) from error


def _shape(name: str, pair: CheckpointPair) -> tuple[int, int]:
    outputs, inputs = pair.base.tensors[name].shape
    return outputs, inputs
