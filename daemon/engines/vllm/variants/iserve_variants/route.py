"""Routing of rows to deltas: which rows each delta has, as device memory that kernels read.

Made on the device without waiting for it, in buffers of a fixed size, so that a captured graph serves every mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Route"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Rows in the order of their slots, cut into segments of one slot and at most ``segment_rows`` rows."""

    segment_rows: int
    slots: int
    order: torch.Tensor
    """int32 [rows]: indices of rows, those of slot 0 first."""
    segments: torch.Tensor
    """int32 [most segments, 4]: slot, first place in ``order``, number of rows, 0."""
    num_segments: torch.Tensor
    """int32 [1]."""
    num_rows: torch.Tensor
    """int32 [1]: routed rows, the first ones of ``order``."""

    @classmethod
    def empty(cls, *, max_rows: int, slots: int, segment_rows: int, device: torch.device | str) -> Route:
        """Return a route of no rows, for at most ``max_rows``."""
        most = min(max_rows, slots + max_rows // segment_rows)
        return cls(
            segment_rows=segment_rows,
            slots=slots,
            order=torch.zeros(max_rows, dtype=torch.int32, device=device),
            segments=torch.zeros(most, 4, dtype=torch.int32, device=device),
            num_segments=torch.zeros(1, dtype=torch.int32, device=device),
            num_rows=torch.zeros(1, dtype=torch.int32, device=device),
        )

    def fill(self, slot_of_row: torch.Tensor) -> None:
        """Route rows by ``slot_of_row``: an integer on the device for each row; -1 or beyond the slots: none."""
        slot = slot_of_row.to(torch.int64)
        slot = torch.where((slot >= 0) & (slot < self.slots), slot, self.slots)
        ids = torch.arange(self.slots, device=slot.device)
        counts = (slot[None, :] == ids[:, None]).sum(1)
        starts = counts.cumsum(0) - counts
        blocks = (counts + self.segment_rows - 1) // self.segment_rows
        ends = blocks.cumsum(0)
        index = torch.arange(self.segments.shape[0], device=slot.device)
        owner = torch.searchsorted(ends, index, right=True).clamp(max=self.slots - 1)
        done = (index - (ends - blocks)[owner]) * self.segment_rows
        rows = (counts[owner] - done).clamp(0, self.segment_rows)
        self.order[: len(slot)].copy_(torch.argsort(slot, stable=True))
        self.segments.copy_(torch.stack([owner, starts[owner] + done, rows, torch.zeros_like(rows)], dim=1))
        self.num_segments.copy_(ends[-1:])
        self.num_rows.copy_(counts.sum().reshape(1))
