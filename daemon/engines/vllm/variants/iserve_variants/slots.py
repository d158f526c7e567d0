"""Slots of deltas on a device: for each module of a model a fixed number of places, filled and emptied one by one.

Their memory is taken once. An empty slot of a matrix has scales of 0 and so adds nothing, whatever its codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iserve_variants.formats import GROUP, TILE_ROWS, CodeFormat
from iserve_variants.recoding import format_in, recode_into
from iserve_variants.reference import dequantize

__all__ = ["EmbeddingSlots", "LinearSlots", "NormSlots", "cut_inputs", "cut_outputs"]

Packed = tuple[torch.Tensor, torch.Tensor]  # codes [tiles, groups, 64, words], scales [groups, padded outputs]


def cut_outputs(packed: Packed, shard: int, outputs: int) -> Packed:
    """Return the ``outputs`` outputs that shard number ``shard`` of a column-parallel matrix has: whole tiles."""
    codes, scales = packed
    tiles = outputs // TILE_ROWS
    return codes[shard * tiles : (shard + 1) * tiles], scales[:, shard * outputs : (shard + 1) * outputs]


def cut_inputs(packed: Packed, shard: int, inputs: int) -> Packed:
    """Return the ``inputs`` inputs that shard number ``shard`` of a row-parallel matrix has: whole groups."""
    codes, scales = packed
    groups = inputs // GROUP
    return codes[:, shard * groups : (shard + 1) * groups], scales[shard * groups : (shard + 1) * groups]


class LinearSlots:
    """Deltas of a linear that may join several matrices with one input, such as q, k and v."""

    def __init__(
        self, *, slots: int, slices: Sequence[int], inputs: int, format_: CodeFormat, device: torch.device | str
    ) -> None:
        if not self.fits(slices, inputs):
            raise ValueError(
                f"slices {list(slices)} are no whole tiles of {TILE_ROWS}, or {inputs} no groups of {GROUP}"
            )
        self.format, self.slices = format_, tuple(slices)
        outputs = sum(slices)
        self.shape = outputs, inputs
        self.codes = torch.zeros(slots, *format_.codes_shape(outputs, inputs), dtype=torch.int16, device=device)
        self.scales = torch.zeros(
            slots, *format_.scales_shape(outputs, inputs), dtype=torch.bfloat16, device=device
        )

    @staticmethod
    def fits(slices: Sequence[int], inputs: int) -> bool:
        """Return whether each slice is whole tiles, and the inputs whole groups."""
        return all(outputs % TILE_ROWS == 0 for outputs in slices) and inputs % GROUP == 0

    def put(self, slot: int, parts: Sequence[Packed | None]) -> None:
        """Fill ``slot`` with a matrix for each slice; None: the fine-tune left that one as it is.

        A matrix may have fewer bits than the slots, whose levels contain its own.

        Raises:
            ValueError: as many parts as slices are needed, of their shapes; the slot is as it was.
        """
        groups = self.codes.shape[2]
        expected = [((size // TILE_ROWS, groups, TILE_ROWS), (groups, size)) for size in self.slices]
        found = [part and (tuple(part[0].shape[:3]), tuple(part[1].shape)) for part in parts]
        formats = [part and format_in(part[0].shape[-1], self.format) for part in parts]
        if len(found) != len(expected) or any(
            one is not None and (one != two or held is None)
            for one, two, held in zip(found, expected, formats, strict=True)
        ):
            shapes = [part and (tuple(part[0].shape), tuple(part[1].shape)) for part in parts]
            raise ValueError(f"parts of shapes {shapes} do not fill slices of {expected}, {self.format.bits} bits")
        first = 0
        for part, of, size in zip(parts, formats, self.slices, strict=True):
            scales = self.scales[slot, :, first : first + size]
            if part is None or of is None:
                scales.zero_()
            else:
                tiles = slice(first // TILE_ROWS, (first + size) // TILE_ROWS)
                recode_into(self.codes[slot, tiles], part[0], of, self.format)
                scales.copy_(part[1], non_blocking=True)
            first += size

    def clear(self, slot: int) -> None:
        """Empty ``slot``."""
        self.scales[slot].zero_()


class NormSlots:
    """Weights of an RMS norm: the base's, and those of each slot, which replace it."""

    def __init__(self, *, slots: int, weight: torch.Tensor) -> None:
        self.table = weight.detach()[None].repeat(slots + 1, 1)
        """[1 + slots, hidden]; row 0 is the base's, row 1 + s that of slot s."""

    def put(self, slot: int, weight: torch.Tensor) -> None:
        """Fill ``slot``.

        Raises:
            ValueError: a weight of another shape.
        """
        if weight.shape != self.table.shape[1:]:
            raise ValueError(
                f"a norm of {list(weight.shape)} does not replace one of {list(self.table.shape[1:])}"
            )
        self.table[slot + 1].copy_(weight, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Give ``slot`` the base's weight."""
        self.table[slot + 1].copy_(self.table[0])

    def normalize(
        self, x: torch.Tensor, slot_of_row: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of ``x`` + ``residual`` with the weight of each row's slot, and that sum, in x's type.

        Args:
            x: [rows, ..., hidden].
            slot_of_row: integers [rows]; -1: the base's weight.
        """
        total = x.float() if residual is None else x.float() + residual.float()
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
        weight = self.table[slot_of_row + 1]
        for _ in range(x.dim() - 2):
            weight = weight.unsqueeze(1)
        return (total * scale).to(x.dtype) * weight, total.to(x.dtype)


class EmbeddingSlots:
    """Changes of an embedding, of which each row reads its token's alone."""

    def __init__(
        self, *, slots: int, shape: tuple[int, int], format_: CodeFormat, device: torch.device | str
    ) -> None:
        self.format, self.shape = format_, shape
        self.codes = torch.zeros(slots, *format_.codes_shape(*shape), dtype=torch.int16, device=device)
        self.scales = torch.zeros(slots, *format_.scales_shape(*shape), dtype=torch.bfloat16, device=device)

    def put(self, slot: int, packed: Packed) -> None:
        """Fill ``slot``.

        Raises:
            ValueError: a matrix of another shape.
        """
        of = format_in(packed[0].shape[-1], self.format)
        if (
            of is None
            or packed[0].shape[:-1] != self.codes.shape[1:-1]
            or packed[1].shape != self.scales.shape[1:]
        ):
            raise ValueError(f"codes {list(packed[0].shape)} do not fill a slot of {list(self.codes.shape[1:])}")
        recode_into(self.codes[slot], packed[0], of, self.format)
        self.scales[slot].copy_(packed[1], non_blocking=True)

    def clear(self, slot: int) -> None:
        """Empty ``slot``."""
        self.scales[slot].zero_()

    def change(self, tokens: torch.Tensor, slot_of_row: torch.Tensor) -> torch.Tensor:
        """Return what each row's slot adds to its token's embedding, float32 [rows, hidden]; 0 for slot -1."""
        slot = slot_of_row.clamp(min=0)
        tile, row = tokens // TILE_ROWS, tokens % TILE_ROWS
        codes = self.codes[slot, tile, :, row]  # [rows, groups, words]
        scales = self.scales[slot, :, tokens].float() * (slot_of_row >= 0)[:, None]  # [rows, groups]
        # The rows as outputs of one tile of as many rows.
        values = dequantize(codes.transpose(0, 1)[None], scales.t(), self.format)
        return values[:, : self.shape[1]]
