"""Device that a compression computes on: its name, and the memory that it must have free."""

from __future__ import annotations

import re
from collections import defaultdict
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
_LIVE_STATES, _LIVE_INPUTS = 4, 3  # of all tokens at once: hidden states or queries, and the widest of a linear
_WORKSPACE_BYTES = 2**30  # CUDA's own, and an attention's
_LAYER = re.compile(r"\.(\d+)\.")  # number of the layer in a tensor's name
Shape = tuple[int, ...]
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
    """Return the bytes that a compression has on its device at most, an estimate from above for models without
    experts. All weights of a layer are there and run, changed or not.
    """
    spec, layers, vocabulary = parts.source.spec, defaultdict[str, list[Shape]](list), [0]
    for name, entry in pair.base.tensors.items():
        number = _LAYER.search(name)
        if number is not None:
            layers[number[1]].append(entry.shape)
        elif len(entry.shape) > 1:
            vocabulary.append(prod(entry.shape))
    changed = [pair.base.tensors[name].shape for own in parts.layers for name in own.values()]
    hidden, inputs = spec.hidden_size, max((shape[1] for shape in changed), default=spec.hidden_size)
    live = _LIVE_STATES * max(hidden, spec.num_heads * spec.head_dim)
    live += _LIVE_INPUTS * max((max(shape) for own in layers.values() for shape in own), default=hidden)
    num_tokens = 0 if tokens is None else tokens.num_tokens
    of_layer = 4 * (max((sum(map(prod, own)) for own in layers.values()), default=0) + max(vocabulary))
    of_layer += _VALUE_BYTES * max(map(prod, changed), default=0) + _MOMENT_BYTES * inputs**2
    of_layer += 4 * num_tokens * live
    of_vocabulary = _VOCABULARY_BYTES * max(vocabulary) + _MOMENT_BYTES * hidden**2 + 4 * num_tokens * hidden
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
