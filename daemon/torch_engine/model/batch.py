"""Tokens of one step, laid flat: where each sequence's piece lies, and which of its tokens want logits.

Knows nothing of models; refuses plans that the loaded limits do not cover.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from daemon.torch_engine.runner_types import StepPlan
from daemon.worker_spec import WorkerLimits

__all__ = ["FlatBatch", "Span", "check_plan"]


@dataclass(frozen=True, slots=True)
class Span:
    """Item of a plan inside the flattened batch: tokens ``first`` to ``first + count`` of it."""

    slot: int
    start: int  # position of its first token in its sequence
    first: int
    count: int
    adapter_id: int | None = None

    @property
    def end(self) -> int:
        """Tokens in the cache once this step has run."""
        return self.start + self.count


@dataclass(slots=True)
class FlatBatch:
    """A :class:`StepPlan` as tensors. ``masks`` is filled by the attention, once per step and window."""

    spans: tuple[Span, ...]
    token_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64
    slots: torch.Tensor  # [T] int64, of each token
    last_tokens: torch.Tensor  # [len(spans)] int64, index of each item's last token in T
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]

    @property
    def mask_elements(self) -> int:
        """Elements of the masks that pieces of prompts with cached tokens before them need, per window at most."""
        return sum(span.count * span.end for span in self.spans if span.count > 1 and span.start)

    @classmethod
    def from_plan(cls, plan: StepPlan, device: torch.device) -> FlatBatch:
        spans, ids, positions, slots, last = [], [], [], [], []
        for item in plan.items:
            count = len(item.token_ids)
            spans.append(Span(item.slot, item.start, len(ids), count, item.adapter_id))
            ids.extend(item.token_ids)
            positions.extend(range(item.start, item.start + count))
            slots.extend([item.slot] * count)
            last.append(len(ids) - 1)
        return cls(
            spans=tuple(spans),
            token_ids=torch.tensor([ids], device=device),
            positions=torch.tensor([positions], device=device),
            slots=torch.tensor(slots, device=device),
            last_tokens=torch.tensor(last, device=device),
        )


def check_plan(plan: StepPlan, limits: WorkerLimits, vocab_size: int, adapter_slots: int = 0) -> None:
    """Raise ValueError (a bug of the scheduler's) for a plan that would write outside what was allocated."""
    total, slots = 0, set()
    for item in plan.items:
        count = len(item.token_ids)
        total += count
        if not count:
            raise ValueError("a step item has no tokens")
        if not 0 <= item.slot < limits.max_batch or item.slot in slots:
            raise ValueError(f"slot {item.slot} is used twice or not one of {limits.max_batch}")
        slots.add(item.slot)
        if item.start < 0 or item.start + count > limits.max_context_tokens:
            raise ValueError(
                f"tokens {item.start} to {item.start + count} of a sequence, room for {limits.max_context_tokens}"
            )
        if min(item.token_ids) < 0 or max(item.token_ids) >= vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {vocab_size}")
    adapters = {item.adapter_id for item in plan.items} - {None}
    if len(adapters) > adapter_slots:
        raise ValueError(f"{len(adapters)} adapters in a step, at most {adapter_slots} are allowed")
    if not 0 < total <= limits.max_batched_tokens:
        raise ValueError(f"a step of {total} tokens, 1 to {limits.max_batched_tokens} are allowed")
