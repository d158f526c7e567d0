"""Routing of one step: which rows have which delta's slot, on the device for kernels and on the host for prompts.

All buffers keep their addresses, so that a captured graph reads the routes of each step that replays it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from iserve_variants.route import Route

__all__ = ["SEGMENT_ROWS", "Run", "StepRoutes"]

SEGMENT_ROWS = 32  # of all tilings that steps choose


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a step from ``start`` to ``end`` that one product takes."""

    slot: int
    """Of the delta that is merged into the weights; -1: the base's weights."""
    start: int
    end: int


class StepRoutes:
    """Rows of the step that runs next."""

    def __init__(
        self,
        *,
        slots: int,
        max_rows: int,
        device: torch.device | str,
        graph_rows: int,
        merged_from_rows: int | None,
    ) -> None:
        """Take the buffers' memory.

        Args:
            slots: of deltas and adapters.
            max_rows: most tokens of a step, and most sampled ones.
            device: of the model.
            graph_rows: most rows of a captured graph; only larger steps may be computed as the host decides.
            merged_from_rows: rows of one delta from which on it is merged; None: never.
        """
        self.slots, self.graph_rows, self.merged_from_rows = slots, graph_rows, merged_from_rows
        self.token_slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        """Slot of each token's row; -1: no delta."""
        self.sample_slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        """Slot of each row that logits are computed of."""
        self.token_route, self.sample_route = (
            Route.empty(max_rows=max_rows, slots=slots, segment_rows=SEGMENT_ROWS, device=device) for _ in range(2)
        )
        """Rows of deltas that are not merged, and all sampled ones."""
        self.wants_samples = False
        """Whether a module reads the routes of samples: an output layer with slots."""
        self.has_variants = False
        """Whether a row has an adapter or a delta: a step without is captured without any of their launches."""
        self.has_routed = False
        """Whether a row is in the route of tokens."""
        self.samples_deltas = False
        self.runs: tuple[Run, ...] = ()
        """All rows of a large step in order, where a delta is merged; empty: one product."""

    def update(self, tokens: Sequence[int], samples: Sequence[int], slot_of_delta: Mapping[int, int]) -> None:
        """Route a step.

        Args:
            tokens: id of the adapter or delta of each token, 0: the base.
            samples: likewise of each row that is sampled.
            slot_of_delta: slot of each delta on the device, by its id; ids that are not in it are adapters.
        """
        ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
        slot_of_row = _slots(ids, slot_of_delta)
        self.has_variants = bool((ids > 0).any())
        merged = self._merged(slot_of_row)
        self.runs = _runs(slot_of_row, merged) if merged else ()
        routed = np.where(np.isin(slot_of_row, list(merged)), -1, slot_of_row) if merged else slot_of_row
        had, self.has_routed = self.has_routed, bool((routed >= 0).any())
        _fill(self.token_slots, slot_of_row)
        if self.has_routed or had:
            self.token_route.fill(torch.from_numpy(routed).to(self.token_slots.device))
        if not self.wants_samples:
            return
        sampled = _slots(np.fromiter(samples, dtype=np.int64, count=len(samples)), slot_of_delta)
        had, self.samples_deltas = self.samples_deltas, bool((sampled >= 0).any())
        if self.samples_deltas or had:
            _fill(self.sample_slots, sampled)
            self.sample_route.fill(torch.from_numpy(sampled).to(self.sample_slots.device))

    def launches(self, rows: int) -> bool:
        """Return whether a product of ``rows`` rows launches the kernel of deltas.

        Rows of a graph decide by the kind of step alone: what is captured has to serve every mix.
        """
        return self.has_variants if rows <= self.graph_rows else self.has_routed

    def _merged(self, slot_of_row: np.ndarray) -> frozenset[int]:
        if self.merged_from_rows is None or len(slot_of_row) <= self.graph_rows:
            return frozenset()
        slots, counts = np.unique(slot_of_row[slot_of_row >= 0], return_counts=True)
        return frozenset(int(slot) for slot in slots[counts >= self.merged_from_rows])


def _slots(ids: np.ndarray, slot_of_delta: Mapping[int, int]) -> np.ndarray:
    slot_of_row = np.full(len(ids), -1, dtype=np.int64)
    for delta, slot in slot_of_delta.items():
        slot_of_row[ids == delta] = slot
    return slot_of_row


def _runs(slot_of_row: np.ndarray, merged: frozenset[int]) -> tuple[Run, ...]:
    weights = np.where(np.isin(slot_of_row, list(merged)), slot_of_row, -1)
    starts = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist()]
    return tuple(
        Run(int(weights[start]), start, end)
        for start, end in zip(starts, [*starts[1:], len(weights)], strict=True)
    )


def _fill(buffer: torch.Tensor, slot_of_row: np.ndarray) -> None:
    buffer.fill_(-1)  # rows that a graph is padded with have no delta
    buffer[: len(slot_of_row)].copy_(torch.from_numpy(slot_of_row))
