"""Updates of a compressed full fine-tune: ``y += x D^T`` for linears, rows of D for embeddings, norms and biases.

The reference: D is turned back from codes and scales in float32, a few tiles at a time, in every step. A matrix
stays packed as it is on disk; a rank of several has the whole tiles and groups in which its part lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from daemon.torch_engine.model.adapters import Rows
from daemon.torch_engine.model.weights import Shard
from fingerprint.delta.formats import GROUP, TILE_ROWS, WORD_BITS, DeltaFormat
from fingerprint.delta.packing import planes

__all__ = ["EmbeddingUpdate", "ExactUpdate", "LinearUpdate", "PackedMatrix"]

_VALUES_AT_ONCE = 2**20  # of D in float32: 4 MiB, and as much again while codes are taken apart


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """Matrix D, or the part of it that a rank has."""

    words: torch.Tensor  # [tiles, groups, 64, words of a row] int16
    scales: torch.Tensor  # [groups, outputs of the tiles] bfloat16
    format: DeltaFormat
    outputs: slice  # of those in the tiles
    inputs: slice  # of those in the groups

    @classmethod
    def of(
        cls,
        words: torch.Tensor,
        scales: torch.Tensor,
        format_: DeltaFormat,
        shape: tuple[int, int],
        shard: Shard | None,
    ) -> PackedMatrix:
        """Return a rank's part of a matrix [outputs, inputs] of ``shape``; ``shard`` None: all of it."""
        whole = (slice(0, shape[0]), slice(0, shape[1]))
        outputs, inputs = (
            slice(*part.indices(side))
            for part, side in zip(shard.slices(shape) if shard else whole, shape, strict=True)
        )
        tiles, groups = _around(outputs, TILE_ROWS), _around(inputs, GROUP)
        rows = slice(tiles.start * TILE_ROWS, tiles.stop * TILE_ROWS)
        return cls(
            words=_own(words[tiles, groups]),
            scales=_own(scales[groups, rows]),
            format=format_,
            outputs=_moved(outputs, rows.start),
            inputs=_moved(inputs, groups.start * GROUP),
        )

    def part(self, shard: Shard, shape: tuple[int, int]) -> PackedMatrix:
        """Return a rank's part of a matrix of ``shape``, of which this is the whole, in the same memory."""
        outputs, inputs = shard.slices(shape)
        return replace(self, outputs=slice(*outputs.indices(shape[0])), inputs=slice(*inputs.indices(shape[1])))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.words, self.scales

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield outputs of this part and their rows of D [outputs, inputs] in float32, some tiles at a time."""
        groups, tiles = self.words.shape[1], _around(self.outputs, TILE_ROWS)
        step = max(1, _VALUES_AT_ONCE // (TILE_ROWS * GROUP * groups))
        for first in range(tiles.start, tiles.stop, step):
            end = min(first + step, tiles.stop)
            codes = _codes(self.words[first:end], self.format.bits)  # [tiles, groups, 64, 128]
            scales = self.scales[:, first * TILE_ROWS : end * TILE_ROWS].float()
            per_tile = scales.view(groups, end - first, TILE_ROWS).transpose(0, 1)[..., None]
            values = ((codes - self.format.zero) * per_tile).transpose(1, 2)
            flat = values.reshape((end - first) * TILE_ROWS, groups * GROUP)[:, self.inputs]
            begin, stop = max(first * TILE_ROWS, self.outputs.start), min(end * TILE_ROWS, self.outputs.stop)
            if begin < stop:
                yield (
                    slice(begin - self.outputs.start, stop - self.outputs.start),
                    flat[begin - first * TILE_ROWS : stop - first * TILE_ROWS],
                )

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the rows [n, inputs] of D, of which this must be the whole, in float32."""
        codes = _codes(self.words[outputs // TILE_ROWS, :, outputs % TILE_ROWS], self.format.bits)
        scales = self.scales[:, outputs].float().t()[..., None]
        return ((codes - self.format.zero) * scales).reshape(len(outputs), -1)[:, self.inputs]


@dataclass(frozen=True, slots=True)
class LinearUpdate:
    """Change of a linear or of the output layer, or a rank's part of it."""

    matrix: PackedMatrix

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.matrix.tensors

    def apply(self, module: nn.Module, inputs: torch.Tensor, output: torch.Tensor, rows: Rows) -> None:
        """Add ``x D^T`` to the outputs, rounded once."""
        mine = inputs.reshape(-1, inputs.shape[-1])[rows.first : rows.end].float()
        outputs = rows.of(output)
        for part, values in self.matrix.pieces():
            outputs[:, part] = outputs[:, part].float().addmm_(mine, values.t())


@dataclass(frozen=True, slots=True)
class EmbeddingUpdate:
    """Change of embeddings, of all tokens on every rank."""

    matrix: PackedMatrix

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.matrix.tensors

    def apply(self, module: nn.Module, inputs: torch.Tensor, output: torch.Tensor, rows: Rows) -> None:
        """Add the rows of the tokens, times the factor that the module has (Gemma's), rounded once."""
        change = self.matrix.rows(inputs.reshape(-1)[rows.first : rows.end])
        factor = getattr(module, "embed_scale", None)
        outputs = rows.of(output)
        outputs.copy_(outputs.float() + (change if factor is None else change * factor))


@dataclass(frozen=True, slots=True)
class ExactUpdate:
    """Norm, or bias of a linear, with the parameters of the variant in place of the base's."""

    parameters: Mapping[str, nn.Parameter]  # by their names in the module

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.parameters.values())

    def apply(self, module: nn.Module, inputs: torch.Tensor, output: torch.Tensor, rows: Rows) -> None:
        """Compute the outputs anew. The module's own forward is called, without its hooks."""
        axis = _token_axis(inputs, rows.total)
        mine = inputs.narrow(axis, rows.first, rows.end - rows.first)
        with _parameters(module, self.parameters):
            output.narrow(axis, rows.first, rows.end - rows.first).copy_(module.forward(mine))


@contextmanager
def _parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Have a module compute with other parameters."""
    former = {name: getattr(module, name) for name in parameters}
    try:
        for name, value in parameters.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in former.items():
            setattr(module, name, value)


def _token_axis(inputs: torch.Tensor, num_tokens: int) -> int:
    """Return the axis of tokens: [tokens, h], [1, tokens, h], [1, tokens, heads, d] or [1, heads, tokens, d].

    Of as many heads as tokens, tokens are the outer ones in memory: their linears have them so.
    """
    axes = [axis for axis in range(inputs.dim() - 1) if inputs.shape[axis] == num_tokens]
    assert axes, f"a module is called with {tuple(inputs.shape)} for {num_tokens} tokens"
    return max(axes, key=lambda axis: (inputs.stride(axis), axis))


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes [..., 128] of rows of words [..., words of a row]: ``fingerprint.delta.packing``."""
    codes, first, low = None, 0, 0
    for width in planes(bits):
        end = first + GROUP * width // WORD_BITS
        piece = words[..., first:end]
        fields = torch.cat([(piece >> at) & (2**width - 1) for at in range(0, WORD_BITS, width)], dim=-1) << low
        codes = fields if codes is None else codes | fields
        first, low = end, low + width
    assert codes is not None
    return codes


def _around(part: slice, size: int) -> slice:
    """Return the blocks of ``size`` in which ``part`` lies."""
    return slice(part.start // size, -(-part.stop // size))


def _moved(part: slice, by: int) -> slice:
    return slice(part.start - by, part.stop - by)


def _own(part: torch.Tensor) -> torch.Tensor:
    """Return a copy: bytes counted are bytes held."""
    return torch.empty(part.shape, dtype=part.dtype).copy_(part)
