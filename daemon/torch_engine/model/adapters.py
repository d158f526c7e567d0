"""LoRA adapters on the linears of one rank: ``y += scale * B (A x)``, for the tokens of each adapter alone.

A linear receives no more than its inputs, so the route of a step (rows of tokens and the adapter of each) is set
once before the forward. Tokens of the base are not touched. An adapter's tokens are a contiguous piece of the
batch and its factors keep their own rank, so nothing is gathered, padded or copied.

Tensor parallelism splits the factors as it splits the linear: where a rank computes some outputs it has the rows
of B that belong to them, where it reads some inputs the columns of A; its part of the sum is added before the
all-reduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from daemon.torch_engine.model.batch import Span
from daemon.torch_engine.model.weights import Shard
from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError
from fingerprint.lora import LoraModule

__all__ = ["AdapterRows", "Factors", "LoadedAdapters", "read_factors", "route"]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors names them


@dataclass(frozen=True, slots=True)
class Factors:
    """Update of one linear, or a rank's part of it."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scale: float

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Tokens ``first`` to ``end - 1`` of a step, which are of one adapter."""

    adapter_id: int
    first: int
    end: int


def route(spans: Sequence[Span]) -> tuple[AdapterRows, ...]:
    """Return the rows of each adapter in a step; those of the base are left out, adjacent items are one piece."""
    rows = []
    for adapter_id, group in itertools.groupby(spans, key=lambda span: span.adapter_id):
        if adapter_id is not None:
            members = list(group)
            rows.append(AdapterRows(adapter_id, members[0].first, members[-1].first + members[-1].count))
    return tuple(rows)


class LoadedAdapters:
    """Adapters that one rank has loaded, on the linears that it has.

    Args:
        linears: by name, the modules that adapters may update.
    """

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        self._linears = linears
        self._factors: dict[int, Mapping[str, Factors]] = {}
        self._rows: tuple[AdapterRows, ...] = ()
        self._num_tokens = 0
        self._connected = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        factors = [each for adapter in self._factors.values() for each in adapter.values()]
        return (*(each.a for each in factors), *(each.b for each in factors))

    def add(self, adapter_id: int, factors: Mapping[str, Factors]) -> None:
        """Keep an adapter: the factors of each linear that it updates."""
        if not self._connected:  # before the hooks that add up what the ranks have
            for name, module in self._linears.items():
                module.register_forward_hook(partial(self._update, name), prepend=True)
            self._connected = True
        self._factors[adapter_id] = factors

    def remove(self, adapter_id: int) -> None:
        """Forget an adapter; one that is not loaded is ignored."""
        self._factors.pop(adapter_id, None)

    def route(self, spans: Sequence[Span]) -> None:
        """Set the adapters of the step that follows.

        Raises:
            ValueError: one of them is not loaded (a bug of the scheduler's).
        """
        self._rows = route(spans)
        self._num_tokens = sum(span.count for span in spans)
        for rows in self._rows:
            if rows.adapter_id not in self._factors:
                raise ValueError(f"adapter {rows.adapter_id} takes part in a step and is not loaded")

    def _update(self, name: str, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Add the updates of a linear to its output, in place."""
        for rows in self._rows:
            factors = self._factors[rows.adapter_id].get(name)
            if factors is not None:
                tokens = slice(rows.first, rows.end)
                inputs = args[0].reshape(-1, args[0].shape[-1])[tokens]
                outputs = output.view(-1, output.shape[-1])
                assert outputs.shape[0] == self._num_tokens, f"{name} is not called with every token"
                outputs[tokens].addmm_(linear(inputs, factors.a), factors.b.t(), alpha=factors.scale)


def read_factors(
    module: LoraModule, weights: Checkpoint, shard: Shard | None, dtype: torch.dtype, device: torch.device
) -> Factors:
    """Return the factors of an update for a rank that has ``shard`` of the linear; None: all of it.

    Raises:
        CheckpointError: a value that ``dtype`` does not hold, or the file changed since its header was read.
    """
    a, b = (_read(name, weights, dtype) for name in module.factors)
    if (tuple(a.shape), tuple(b.shape)) != ((module.rank, module.in_features), (module.out_features, module.rank)):
        raise CheckpointError(f"the adapter in {weights.directory} was changed while read; load it again")
    if shard is not None and shard.dim == 0:
        b = b[shard.slices(tuple(b.shape))]
    elif shard is not None:
        a = a[shard.slices(tuple(a.shape))]
    return Factors(_own(a, device), _own(b, device), module.scale)


def _own(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy: bytes counted are bytes held, though the whole factor was read."""
    return torch.empty(part.shape, dtype=part.dtype, device=device).copy_(part)


def _read(name: str, weights: Checkpoint, dtype: torch.dtype) -> torch.Tensor:
    entry = weights.tensors.get(name)
    if entry is None or entry.dtype not in _DTYPES or not entry.num_bytes:
        raise CheckpointError(f"the adapter in {weights.directory} was changed while read; load it again")
    # In its own type: all requests wait for this, and detours over float32 take several times as long.
    values = torch.frombuffer(bytearray(weights.read(name)), dtype=_DTYPES[entry.dtype])
    found = values.reshape(entry.shape).to(dtype)
    if not all(bound.isfinite() for bound in torch.aminmax(found)):  # NaN, where any value is
        raise CheckpointError(
            f"tensor {name[:200]!r} of {weights.directory} has values that are not finite in {dtype}; the "
            "training diverged, or the file is damaged: take an earlier one"
        )
    return found
