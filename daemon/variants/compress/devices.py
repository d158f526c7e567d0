"""Device that a compression computes on: its name, and the memory that it must have free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from daemon.devices import read_machine
from daemon.variants.compress.calibration import CalibrationTokens
from daemon.variants.compress.model_parts import ModelParts
from daemon.variants.compress.pair import CheckpointPair
from daemon.variants.device_names import gpu_number
from fingerprint.errors import ConfigError, UnavailableError

__all__ = ["begin_on", "check_free", "clear_out_of_memory", "compute_device", "needed_device_bytes"]

_VALUE_BYTES = 32  # of a weight of the matrix that is compressed: base, change, codes, errors and copies
_VOCABULARY_BYTES = 20  # the same of embeddings and output layer, whose rows are solved in several parts
_MOMENT_BYTES = 28  # of a pair of its inputs: second moments, and their factor in float64
_LIVE_STATES, _LIVE_INPUTS = 4, 3  # of all tokens at once: hidden states, and inputs of the widest linear
_WORKSPACE_BYTES = 2**30  # CUDA's own, and an attention's
_GPU_IS_FULL = ("out of memory", "ALLOC_FAILED")  # of torch's own allocator and of CUDA; of cuBLAS and cuSOLVER
_GPU = "a GPU (--device cuda:N)"
_FEWER = "fewer calibration tokens (--calibration FILE, with fewer texts)"


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


def begin_on(device: torch.device) -> None:
    """Begin to use a device, before anything long is done for it: a GPU's context must find room.

    Raises:
        UnavailableError: the GPU is full.
    """
    if device.type == "cuda":
        _check_gpu(device, _WORKSPACE_BYTES, "at least")


def check_free(device: torch.device, needed_bytes: int) -> None:
    """Raise UnavailableError unless the device has so many bytes free: what a GPU serves keeps its memory."""
    if device.type == "cuda":
        _check_gpu(device, needed_bytes, "up to")
        return
    machine = read_machine()
    free, total = machine.available_bytes, machine.memory_bytes
    if free < needed_bytes:
        raise UnavailableError(
            f"this machine has {_gib(free)} of {_gib(total)} GiB of memory free, and this compression needs up to "
            f"{_gib(needed_bytes)}; end other programs, or take {_FEWER} or {_GPU}"
        )


def _check_gpu(device: torch.device, needed_bytes: int, bound: str) -> None:
    torch.cuda.empty_cache()  # what an earlier format of this process left is free
    free, total = torch.cuda.mem_get_info(device)
    if free < needed_bytes:
        raise UnavailableError(
            f"{device} has {_gib(free)} of {_gib(total)} GiB free, and this compression needs {bound} "
            f"{_gib(needed_bytes)}; take a GPU that serves nothing, or the CPU: leave --device out"
        )


@contextmanager
def clear_out_of_memory(device: torch.device) -> Iterator[None]:
    """Raise UnavailableError where the device or the machine has no memory left within the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        words = str(error)
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in words:
            raise UnavailableError(
                "this machine ran out of memory, which another process may have taken; what is done is kept: the "
                f"same command goes on with it, once there is more or on {_GPU}; it begins anew and needs less "
                f"with {_FEWER}"
            ) from error
        if any(each in words for each in _GPU_IS_FULL):
            raise UnavailableError(
                f"{device} ran out of memory, which another process may have taken; what is done is kept: the "
                "same command goes on with it, on another GPU or, without --device, on the CPU"
            ) from error
        raise


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _shape(name: str, pair: CheckpointPair) -> tuple[int, int]:
    outputs, inputs = pair.base.tensors[name].shape
    return outputs, inputs
