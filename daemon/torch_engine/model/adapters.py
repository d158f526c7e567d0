"""Variants of the base on one rank, for the tokens of each alone; of LoRA adapters ``y += scale * B (A x)``.

A module receives no more than its inputs, so the route of a step (rows of tokens and the variant of each) is set
once before the forward. Tokens of the base are not touched. A variant's tokens are a contiguous piece of the
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
from typing import Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear

from daemon.torch_engine.model.batch import Span
from daemon.torch_engine.model.weights import Shard
from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError
from fingerprint.lora import LoraModule

__all__ = [
    "DTYPES",
    "AdapterRows",
    "Factors",
    "LoadedAdapters",
    "Part",
    "Rows",
    "Update",
    "Updates",
    "read_into",
    "route",
    "tensors_of",
]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors names them


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``first`` to ``end - 1`` of the ``total`` that a module is called with."""

    first: int
    end: int
    total: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of these rows of ``values`` [..., features], as [rows, features]."""
        flat = values.view(-1, values.shape[-1])
        assert flat.shape[0] == self.total, f"a module was called with {flat.shape[0]} of {self.total} rows"
        return flat[self.first : self.end]


class Update(Protocol):
    """Part of a variant that changes what one module computes."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that it holds."""
        ...

    def apply(self, module: nn.Module, inputs: torch.Tensor, output: torch.Tensor, rows: Rows) -> None:
        """Make ``rows`` of the module's ``output`` those of the variant, in place."""
        ...


Updates: TypeAlias = Mapping[str, Sequence[Update]]  # of a variant, by module


@dataclass(frozen=True, slots=True)
class Factors:
    """Update of one linear by an adapter, or a rank's part of it."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b

    def apply(self, module: nn.Module, inputs: torch.Tensor, output: torch.Tensor, rows: Rows) -> None:
        """Add the update to the outputs."""
        mine = inputs.reshape(-1, inputs.shape[-1])[rows.first : rows.end]
        rows.of(output).addmm_(linear(mine, self.a), self.b.t(), alpha=self.scale)


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
    """Tokens ``first`` to ``end - 1`` of a step, of one variant, and its items among those of the step."""

    adapter_id: int
    first: int
    end: int
    first_item: int = 0
    end_item: int = 0


def route(spans: Sequence[Span]) -> tuple[AdapterRows, ...]:
    """Return the rows of each variant in a step; those of the base are left out, adjacent items are one piece."""
    rows, item = [], 0
    for adapter_id, group in itertools.groupby(spans, key=lambda span: span.adapter_id):
        members = list(group)
        first, end, after = members[0].first, members[-1].first + members[-1].count, item + len(members)
        if adapter_id is not None:
            rows.append(AdapterRows(adapter_id, first, end, item, after))
        item = after
    return tuple(rows)


class LoadedAdapters:
    """Variants that one rank has loaded or prepared, on the modules that it has.

    :meth:`prepare` may be called while a step runs, and :attr:`tensors` read; the rest between steps. The caller
    lets one thread at a time change this.

    Args:
        modules: by name, those that variants may update.
        per_item: the one that is called with a row for each item of a step, not each token: the output layer.
    """

    def __init__(self, modules: Mapping[str, nn.Module], per_item: str | None = None) -> None:
        self._modules, self._per_item = modules, per_item
        self._updates: Mapping[int, Updates] = {}  # replaced, never changed, as is the next
        self._prepared: Mapping[int, Updates] = {}
        self._rows: tuple[AdapterRows, ...] = ()
        self._num_tokens = self._num_items = 0
        self._connected: set[str] = set()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        variants = {**self._prepared, **self._updates}
        return tuple(itertools.chain.from_iterable(tensors_of(each) for each in variants.values()))

    def prepare(self, adapter_id: int, updates: Updates) -> None:
        """Keep a variant that no step may name yet: what it updates of each module, in turn."""
        self._prepared = {**self._prepared, adapter_id: updates}

    def switch(self, adapter_id: int) -> None:
        """Let steps name a prepared variant from now on.

        Raises:
            ValueError: it is not prepared (a bug of the caller's).
        """
        if adapter_id not in self._prepared:
            raise ValueError(f"adapter {adapter_id} is switched to and is not prepared")
        updates = self._prepared[adapter_id]
        for name in updates.keys() - self._connected:  # before the hooks that add up what the ranks have
            self._modules[name].register_forward_hook(partial(self._update, name), prepend=True)
            self._connected.add(name)
        self._updates = {**self._updates, adapter_id: updates}
        self._prepared = _without(self._prepared, adapter_id)

    def remove(self, adapter_id: int) -> None:
        """Forget a variant, loaded or prepared; one that is neither is ignored."""
        self._updates = _without(self._updates, adapter_id)
        self._prepared = _without(self._prepared, adapter_id)

    def route(self, spans: Sequence[Span]) -> None:
        """Set the variants of the step that follows.

        Raises:
            ValueError: one of them is not loaded (a bug of the scheduler's).
        """
        self._rows = route(spans)
        self._num_tokens, self._num_items = sum(span.count for span in spans), len(spans)
        for rows in self._rows:
            if rows.adapter_id not in self._updates:
                raise ValueError(f"adapter {rows.adapter_id} takes part in a step and is not loaded")

    def _update(self, name: str, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Make the output of a module that of each variant for its rows, in place."""
        for each in self._rows:
            for update in self._updates[each.adapter_id].get(name, ()):
                if name == self._per_item:
                    rows = Rows(each.first_item, each.end_item, self._num_items)
                else:
                    rows = Rows(each.first, each.end, self._num_tokens)
                update.apply(module, args[0], output, rows)


def tensors_of(updates: Updates) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a variant."""
    return tuple(tensor for of_module in updates.values() for update in of_module for tensor in update.tensors)


def _without(adapters: Mapping[int, Updates], adapter_id: int) -> Mapping[int, Updates]:
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
    if entry is None or entry.dtype not in DTYPES or not entry.num_bytes:
        raise CheckpointError(f"the adapter in {weights.directory} was changed while read; load it again")
    # In its own type: requests wait for this, and detours over float32 take several times as long.
    values = torch.frombuffer(bytearray(weights.read(name)), dtype=DTYPES[entry.dtype])
    found = values.reshape(entry.shape).to(dtype)
    if not all(bound.isfinite() for bound in torch.aminmax(found)):  # NaN, where any value is
        raise CheckpointError(
            f"tensor {name[:200]!r} of {weights.directory} has values that are not finite in {dtype}; the "
            "training diverged, or the file is damaged: take an earlier one"
        )
    return found
