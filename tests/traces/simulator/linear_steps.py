"""Step times that are linear in sequences, context and prompt tokens, for references worked out by hand."""

from __future__ import annotations

import numpy as np

from traces.simulator.step_model import Limits, StepModel

__all__ = ["linear_steps"]


def linear_steps(
    limits: Limits,
    *,
    step_s: float,
    sequence_s: float = 0.0,
    context_token_s: float = 0.0,
    prompt_token_s: float = 0.0,
) -> StepModel:
    """Return steps of ``step_s``, and so much more per decoding sequence, token of context, and prompt token."""
    batch = np.arange(1, limits.max_batch + 1, dtype=np.float64)[:, None]
    contexts = np.array([1.0, float(max(limits.max_context_tokens, 2))])
    return StepModel(
        limits,
        contexts=contexts,
        decode_s=step_s + sequence_s * batch + context_token_s * batch * contexts,
        tokens_s=step_s + prompt_token_s * np.arange(limits.max_batched_tokens + 1.0),
        attention_s=np.zeros(limits.max_context_tokens + 1),
    )
