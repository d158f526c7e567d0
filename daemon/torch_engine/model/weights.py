"""Reads a model's parameters from safetensors files: one tensor, or one rank's slice of it, at a time.

Decides which stored tensors make up a parameter of transformers' model class. Never loads a pickle, never holds
more than the parameter being read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError

__all__ = ["Shard", "WeightReader"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The ``index``-th of ``count`` equal parts of a tensor along ``dim``."""

    dim: int
    index: int
    count: int

    def slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        size = shape[self.dim] // self.count
        assert size * self.count == shape[self.dim]
        at: list[slice] = [slice(None)] * len(shape)
        at[self.dim] = slice(self.index * size, (self.index + 1) * size)
        return tuple(at)


class WeightReader:
    """Open safetensors files of one checkpoint directory. A context manager: leaving it unmaps the files.

    Raises:
        CheckpointError: no safetensors, a file that is missing or cut short, or tensors that are not there.
    """

    def __init__(self, checkpoint: Path, family: str) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        # The files that a plan was made of, checked as they were then: names, sizes and headers.
        self._file_of = {name: entry.file.name for name, entry in Checkpoint.open(checkpoint).tensors.items()}
        self._converters = tuple(get_checkpoint_conversion_mapping(family) or ())

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the parameter ``name`` of the full ``shape``, or this rank's shard of it, in its own memory."""
        stored = self.stored_name(name)
        if stored is not None:
            return self._own(self._slice(stored, shape, shard), dtype, device)
        pieces = self._expert_pieces(name, shape)
        if pieces is None:
            raise CheckpointError(f"{self._checkpoint} has no tensor {name}; is it the checkpoint of this config?")
        return self._read_experts(pieces, shape, shard, dtype, device)

    def stored_name(self, name: str) -> str | None:
        """Return the tensor that the parameter ``name`` is stored as; None where it is joined of several."""
        return next((stored for stored in (name, *self._renamed(name)) if stored in self._file_of), None)

    def _own(self, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # A tensor from safe_open may be a view of the mapped file: copy, so that bytes counted are bytes held.
        return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)

    def _slice(self, stored: str, shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        try:
            found = self._file(self._file_of[stored]).get_slice(stored)
            if tuple(found.get_shape()) != shape:
                raise CheckpointError(
                    f"{stored} in {self._checkpoint} is {tuple(found.get_shape())}, config.json asks for {shape}"
                )
            return found[shard.slices(shape) if shard else (slice(None),) * len(shape)]
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {stored} in {self._checkpoint}: {str(error)[:200]}") from error

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self._checkpoint / name
            try:
                self._files[name] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except FileNotFoundError as error:
                raise CheckpointError(f"the index names {path}, which is not there") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read (cut short?): {str(error)[:200]}") from error
        return self._files[name]

    def _renamed(self, name: str) -> Iterator[str]:
        """Yield names that checkpoints of this family use for ``name``, by transformers' own table."""
        for change in self._converters:
            if type(change) is WeightRenaming:
                for source, target in zip(change.source_patterns, change.target_patterns, strict=True):
                    if target in name:
                        yield name.replace(target, source)

    def _expert_pieces(self, name: str, shape: tuple[int, ...]) -> list[list[str]] | None:
        """Return stored names of a parameter that joins all experts: per expert, the tensors to lay end to end."""
        for change in self._converters:
            if not isinstance(change, WeightConverter) or len(change.target_patterns) != 1:
                continue
            kinds = [type(operation) for operation in change.operations]
            target = change.target_patterns[0]
            if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]) or not name.endswith(target):
                continue
            for base in (name, *self._renamed(name)):
                prefix = base.removesuffix(target)
                pieces = [
                    [prefix + source.replace("*", str(expert), 1) for source in change.source_patterns]
                    for expert in range(shape[0])
                ]
                if pieces[0][0] in self._file_of:
                    return pieces
        return None

    def _read_experts(
        self,
        pieces: list[list[str]],
        shape: tuple[int, ...],
        shard: Shard | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Return [experts, out, in]; each expert's ``out`` rows are its pieces in turn, each sharded alike."""
        each = (shape[1] // len(pieces[0]), shape[2])
        part = Shard(shard.dim - 1, shard.index, shard.count) if shard else None
        local = list(shape)
        if shard:
            local[shard.dim] //= shard.count
        result = torch.empty(local, dtype=dtype, device=device)
        for expert, names in enumerate(pieces):
            for place, target in enumerate(result[expert].chunk(len(names), dim=0)):
                if names[place] not in self._file_of:
                    raise CheckpointError(f"{self._checkpoint} has no tensor {names[place]}")
                target.copy_(self._slice(names[place], each, part))
        return result
