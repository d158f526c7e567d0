"""LoRA adapters on the linears of one rank: ``y += scale * B (A x)``, for the tokens of each adapter alone.

A linear receives no more than its inputs, so the route of a step (rows of tokens and the adapter of each) is set
once before the forward. Tokens of the base are not touched. An adapter's tokens are a contiguous piece of the
batch and its factors keep their own rank, so nothing is gathered, padded or copied.

Tensor parallelism splits the factors as it splits the linear: where a rank computes some outputs it has the rows
of B that belong to them, where it reads some inputs the columns of A; its part of the sum is added before the
all-reduce.

An adapter is prepared next to the steps, in another thread: its memory is allocated, its values are read. Then a
switch between two steps makes it usable, which moves no values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear

from daemon.torch_engine.model.batch import Span
from daemon.torch_engine.model.weights import Shard
from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError
from fingerprint.lora import LoraModule

__all__ = ["AdapterRows", "Factors", "LoadedAdapters", "Part", "read_into", "route"]

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


_FactorsOf: TypeAlias = Mapping[str, Factors]  # an adapter, by linear


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an update for a rank that has ``shard`` of the linear; None: all of it."""

    module: LoraModule
    shard: Shard | None

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> Factors:
        """Return factors without values; on the device ``meta`` they take no memory."""
        module = self.module
        b, a = (module.out_features, module.rank), (module.rank, module.in_features)
        if self.shard is not None and self.shard.dim == 0:
            b = (module.out_features // self.shard.count, module.rank)
        elif self.shard is not None:
            a = (module.rank, module.in_features // self.shard.count)
        empty = partial(torch.empty, dtype=dtype, device=device)
        return Factors(empty(a), empty(b), module.scale)


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
    """Adapters that one rank has loaded or prepared, on the linears that it has.

    :meth:`prepare` may be called while a step runs, and :attr:`tensors` read; the rest between steps. The caller
    lets one thread at a time change this.

    Args:
        linears: by name, the modules that adapters may update.
    """

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        self._linears = linears
        self._factors: Mapping[int, _FactorsOf] = {}  # replaced, never changed, as is the next
        self._prepared: Mapping[int, _FactorsOf] = {}
        self._rows: tuple[AdapterRows, ...] = ()
        self._num_tokens = 0
        self._connected = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        adapters = {**self._prepared, **self._factors}
        factors = [each for adapter in adapters.values() for each in adapter.values()]
        return (*(each.a for each in factors), *(each.b for each in factors))

    def prepare(self, adapter_id: int, factors: Mapping[str, Factors]) -> None:
        """Keep an adapter that no step may name yet: the factors of each linear that it updates."""
        self._prepared = {**self._prepared, adapter_id: factors}

    def switch(self, adapter_id: int) -> None:
        """Let steps name a prepared adapter from now on.

        Raises:
            ValueError: it is not prepared (a bug of the caller's).
        """
        if adapter_id not in self._prepared:
            raise ValueError(f"adapter {adapter_id} is switched to and is not prepared")
        if not self._connected:  # before the hooks that add up what the ranks have
            for name, module in self._linears.items():
                module.register_forward_hook(partial(self._update, name), prepend=True)
            self._connected = True
        self._factors = {**self._factors, adapter_id: self._prepared[adapter_id]}
        self._prepared = _without(self._prepared, adapter_id)

    def remove(self, adapter_id: int) -> None:
        """Forget an adapter, loaded or prepared; one that is neither is ignored."""
        self._factors = _without(self._factors, adapter_id)
        self._prepared = _without(self._prepared, adapter_id)

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


def _without(adapters: Mapping[int, _FactorsOf], adapter_id: int) -> Mapping[int, _FactorsOf]:
    return {key: value for key, value in adapters.items() if key != adapter_id}


def read_into(factors: Factors, part: Part, weights: Checkpoint) -> None:
    """Read the values of ``part`` into ``factors``, which are its own and empty.

    Raises:
        CheckpointError: a value that their type does not hold, or the file changed since its header was read.
    """
    module, shard = part.module, part.shard
    a, b = (_read(name, weights, factors.a.dtype) for name in module.factors)
    if (tuple(a.shape), tuple(b.shape)) != ((module.rank, module.in_features), (module.out_features, module.rank)):
        raise CheckpointError(f"the adapter in {weights.directory} was changed while read; load it again")
    if shard is not None and shard.dim == 0:
        b = b[shard.slices(tuple(b.shape))]
    elif shard is not None:
        a = a[shard.slices(tuple(a.shape))]
    factors.a.copy_(a)
    factors.b.copy_(b)


def _read(name: str, weights: Checkpoint, dtype: torch.dtype) -> torch.Tensor:
    entry = weights.tensors.get(name)
    if entry is None or entry.dtype not in _DTYPES or not entry.num_bytes:
        raise CheckpointError(f"the adapter in {weights.directory} was changed while read; load it again")
    # In its own type: requests wait for this, and detours over float32 take several times as long.
    values = torch.frombuffer(bytearray(weights.read(name)), dtype=_DTYPES[entry.dtype])
    found = values.reshape(entry.shape).to(dtype)
    if not all(bound.isfinite() for bound in torch.aminmax(found)):  # NaN, where any value is
        raise CheckpointError(
            f"tensor {name[:200]!r} of {weights.directory} has values that are not finite in {dtype}; the "
            "training diverged, or the file is damaged: take an earlier one"
        )
    return found
