"""Routing of one step: which rows have which delta's slot, on the device for kernels and on the host for prompts.

All buffers keep their addresses, so that a captured graph reads the routes of each step that replays it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch

from iserve_variants.route import Route

__all__ = ["SEGMENT_ROWS", "Run", "StepKind", "StepRoutes"]

SEGMENT_ROWS = 32  # of all tilings that steps choose
_SORTED = (1, 33, 129, 1025, 4097, 65536)  # rows, beyond the bounds of torch's kernels that sort


class StepKind(IntFlag):
    """Variants among a step's rows, by which graphs are told apart; the values are keys of graphs."""

    BASE = 0
    DELTAS = 1
    ADAPTERS = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a step from ``start`` to ``end`` that one product takes."""

    slot: int
    """Of the delta that is merged into the weights; -1: the base's weights."""
    start: int
    end: int


class _Rows:
    """Slots and route of rows on the device, written where they differ from those of the step before."""

    def __init__(self, max_rows: int, slots: int, device: torch.device | str) -> None:
        self.slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self.route = Route.empty(max_rows=max_rows, slots=slots, segment_rows=SEGMENT_ROWS, device=device)
        self._slot_of_row = self._routed = np.empty(0, dtype=np.int64)

    @property
    def slot_of_row(self) -> np.ndarray:
        """Slot of each row, on the host; empty: no row has one."""
        return self._slot_of_row

    def fill(self, slot_of_row: np.ndarray, routed: np.ndarray) -> bool:
        """Write the slot of each row, and route those of ``routed`` that have one; return whether a row has."""
        slot_of_row, routed = (one if (one >= 0).any() else one[:0] for one in (slot_of_row, routed))
        if not np.array_equal(slot_of_row, self._slot_of_row):
            self.slots.fill_(-1)  # rows that a graph is padded with have no delta
            self.slots[: len(slot_of_row)].copy_(torch.from_numpy(slot_of_row))
            self._slot_of_row = slot_of_row
        if not np.array_equal(routed, self._routed):
            self.route.fill(torch.from_numpy(routed).to(self.slots.device))
            self._routed = routed
        return len(routed) > 0


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
        self._tokens, self._samples = (_Rows(max_rows, slots, device) for _ in range(2))
        self._prompts = Route.empty(max_rows=max_rows, slots=slots, segment_rows=SEGMENT_ROWS, device=device)
        self.wants_samples = False
        """Whether a module reads the routes of samples: an output layer with slots."""
        self.kind = StepKind.BASE
        """Kind of the step's graph, which has the launches of its rows at least."""
        self._rows, self._expected = StepKind.BASE, None
        self.has_routed = False
        """Whether a row is in the route of tokens."""
        self.samples_deltas = False
        """Whether a sampled row has a delta."""
        self.logits_route: Route | None = None
        """Rows of deltas that logits are computed of now; None: none of them has one."""
        self.runs: tuple[Run, ...] = ()
        """All rows of a large step in order, where a delta is merged; empty: one product."""

    @property
    def token_slots(self) -> torch.Tensor:
        """Slot of each token's row; -1: no delta."""
        return self._tokens.slots

    @property
    def token_route(self) -> Route:
        """Rows of deltas that are not merged."""
        return self._tokens.route

    @property
    def sample_slots(self) -> torch.Tensor:
        """Slot of each row that logits are computed of."""
        return self._samples.slots

    @property
    def sample_route(self) -> Route:
        """Sampled rows of deltas."""
        return self._samples.route

    @contextmanager
    def of_prompts(self, first: int, rows: int) -> Iterator[None]:
        """Have :attr:`logits_route` be that of ``rows`` tokens of the step from ``first`` on.

        These are rows of prompts, whose logprobs are asked for. The route of samples has other rows' deltas for
        them, and may name more rows than there are.
        """
        former, slots = self.logits_route, self._tokens.slot_of_row[first : first + rows]
        self.logits_route = self._prompts if (slots >= 0).any() else None
        if self.logits_route is not None:
            self._prompts.fill(torch.from_numpy(slots).to(self._prompts.order.device))
        try:
            yield
        finally:
            self.logits_route = former

    def update(self, tokens: Sequence[int], samples: Sequence[int], slot_of_delta: Mapping[int, int]) -> None:
        """Route a step.

        Args:
            tokens: id of the adapter or delta of each token, 0: the base.
            samples: likewise of each row that is sampled.
            slot_of_delta: slot of each delta on the device, by its id; ids that are not in it are adapters.
        """
        ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
        slot_of_row = _slots(ids, slot_of_delta)
        self._rows = _kind(ids, slot_of_row)
        self.kind = self._expected_kind()
        merged = self._merged(slot_of_row)
        self.runs = _runs(slot_of_row, merged) if merged else ()
        routed = np.where(np.isin(slot_of_row, list(merged)), -1, slot_of_row) if merged else slot_of_row
        self.has_routed = self._tokens.fill(slot_of_row, routed)
        if self.wants_samples:
            sampled = _slots(np.fromiter(samples, dtype=np.int64, count=len(samples)), slot_of_delta)
            self.samples_deltas = self._samples.fill(sampled, sampled)
            self.logits_route = self.sample_route if self.samples_deltas else None

    def warm_up(self) -> None:
        """Route steps of the sizes that torch sorts in different ways, then one of no rows."""
        kept, self.merged_from_rows = self.merged_from_rows, None
        for rows in sorted({min(count, len(self.token_slots)) for count in _SORTED}):
            self.update([1] * rows, [1] * rows, {1: 0})
        self.update([0], [0], {})
        self.merged_from_rows = kept

    def expect(self, kind: StepKind | None) -> None:
        """Have the step that is routed next be of the kind whose graph was chosen for it; None: none was."""
        self._expected = kind

    def launch_as(self, kind: StepKind) -> None:
        """Launch what steps of ``kind`` do until a step is routed."""
        self.kind, self._expected = kind, None

    def _expected_kind(self) -> StepKind:
        """Return the kind that was expected; where none was, one graph serves whatever is no base.

        Raises:
            RuntimeError: the graph that was chosen does not compute all rows.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return StepKind.BOTH if self._rows else StepKind.BASE
        if self._rows & ~expected:
            raise RuntimeError(f"a step of {self._rows!r} is routed, its graph is of {expected!r}")
        return expected

    def launches(self, rows: int) -> bool:
        """Return whether a product of ``rows`` rows launches the kernel of deltas.

        Rows of a graph decide by the kind of step alone: what is captured has to serve every mix.
        """
        return bool(self.kind & StepKind.DELTAS) if rows <= self.graph_rows else self.has_routed

    def launches_adapters(self, rows: int) -> bool:
        """Return whether a product of ``rows`` rows launches kernels of adapters, likewise."""
        return bool(self._kind_of(rows) & StepKind.ADAPTERS)

    def changes_embeddings(self, rows: int) -> bool:
        """Return whether embeddings of ``rows`` tokens get the changes of deltas, likewise."""
        return bool(self._kind_of(rows) & StepKind.DELTAS)

    def _kind_of(self, rows: int) -> StepKind:
        return self.kind if rows <= self.graph_rows else self._rows

    def _merged(self, slot_of_row: np.ndarray) -> frozenset[int]:
        if self.merged_from_rows is None or len(slot_of_row) <= self.graph_rows:
            return frozenset()
        slots, counts = np.unique(slot_of_row[slot_of_row >= 0], return_counts=True)
        return frozenset(int(slot) for slot in slots[counts >= self.merged_from_rows])


def _kind(ids: np.ndarray, slot_of_row: np.ndarray) -> StepKind:
    deltas, variants = (slot_of_row >= 0), ids > 0
    kind = StepKind.DELTAS if deltas.any() else StepKind.BASE
    return kind | StepKind.ADAPTERS if (variants & ~deltas).any() else kind


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
