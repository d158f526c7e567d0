"""Interface between the serving and the executing half of the engine: plans, limits and results of steps.

The scheduler (pure) decides a :class:`StepPlan`; a :class:`Runner` executes it on all ranks. Neither knows of
HTTP, tokenizers or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from daemon.worker_spec import StageAssignment, WorkerLimits
from fingerprint.config import DeploymentConfig
from fingerprint.measurements import RankMemory

__all__ = ["Runner", "StepItem", "StepPlan", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepItem:
    """The next tokens of one sequence: a prompt (or a piece of it), or the one token sampled last."""

    slot: int  # the sequence's place in the KV cache, 0 <= slot < max_batch
    start: int  # position of the first of ``token_ids``; that many tokens are cached already
    token_ids: tuple[int, ...]
    adapter_id: int | None = None  # None: the base alone


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Forward pass over several sequences at once, prompts and single tokens mixed."""

    items: tuple[StepItem, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a forward pass and the time that it took."""

    logits: torch.Tensor  # [len(items), vocab] float32 on the CPU: after the last token of each item
    device_s: float  # inside the forward of the slowest rank of each stage, summed over stages
    handover_s: float  # of that, moving hidden states between stages
    busy_s: tuple[float, ...]  # per rank, the seconds it executed its own part


class Runner(Protocol):
    """Executes steps of one loaded model on tp * pp ranks.

    Not thread-safe: one caller. Only :meth:`prepare_adapter` may be called in another thread meanwhile, by one
    caller as well, but not while a model is loaded.
    """

    vocab_size: int

    def load(
        self,
        checkpoint: Path,
        config: DeploymentConfig,
        stages: tuple[StageAssignment, ...],
        limits: WorkerLimits,
    ) -> None:
        """Replace what is loaded. KV room is ``max_batch`` slots of ``max_context_tokens``.

        Raises:
            CheckpointError: files missing or contradictory.
            EngineError: no room, or a rank is gone.
        """
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run the plan; the KV of its tokens is written.

        Raises:
            EngineError: a rank is gone or out of memory; the runner is unusable afterwards.
        """
        ...

    def prepare_adapter(self, adapter_id: int, folder: Path) -> None:
        """Read the adapter in ``folder`` and hold it on all ranks, or on none, while steps go on.

        Args:
            adapter_id: the number by which steps name it after :meth:`switch_adapter`; never used before.

        Raises:
            BadInputError: it does not fit the loaded model or the rank of its slots; nothing has changed.
            EngineError: no room, or a rank is gone, which ends the runner at its next call.
        """
        ...

    def switch_adapter(self, adapter_id: int) -> None:
        """Let the steps that follow name a prepared adapter, on all ranks; nothing is read or moved.

        Raises:
            EngineError: a rank is gone; the runner is unusable afterwards.
        """
        ...

    def unload_adapter(self, adapter_id: int) -> None:
        """Free an adapter that takes part in no further step, or was prepared; an unknown one is ignored.

        Raises:
            EngineError: a rank is gone; the runner is unusable afterwards.
        """
        ...

    def memory(self) -> tuple[RankMemory, ...]:
        """Return live bytes per rank as counted, activation peak since ``load``.

        Raises:
            EngineError: a rank is gone; the runner is unusable afterwards.
        """
        ...

    def close(self) -> None:
        """End the other ranks and free the memory. Safe to call twice."""
        ...
