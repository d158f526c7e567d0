"""Time of low-bit deltas of full fine-tunes next to their base, from kernels that were timed alone.

Measured on one H200 for all four linears of the 32 layers of Llama-3.1-8B in int2, one tiling for any mix
(``tests.bench.delta_kernels``, third run; docs/decisions/0047-delta-kernels.md). vLLM ran them later (decision
48): what they add to its steps is estimated here, and so is all of another model or format, in proportion to the
delta's bytes. By that rule int4 with 8 deltas takes 13.2 ms where 9.9 was measured, int3 10.0 where 13.5 was.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["MEASURED_DELTA_BYTES", "added_delta_step_s", "delta_prompt_s"]

# Of the delta whose kernels were timed: linears and output layer in int2, embeddings in int4
# (``fingerprint.delta.delta_bytes`` of Llama-3.1-8B).
MEASURED_DELTA_BYTES: Final = 2_264_400_000
_DELTAS = (1.0, 4.0, 8.0, 32.0)  # distinct in a step
_MS_OF_32_ROWS = (2.57, 3.88, 6.78, 24.56)
_MS_OF_128_ROWS = (5.4, 6.3, 8.3, 25.5)
# Of one delta's rows in prompts: the kernel up to 64, merging from 256 on. All layers, beyond the base's product:
# the base's time of a layer, times (what was measured as its multiple - 1), times 32.
_PROMPT_ROWS = (32.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
_PROMPT_MS = (2.57, 3.6, 8.6, 8.4, 9.1, 8.9, 11.8)


def added_delta_step_s(delta_bytes: float, rows: float, active: float) -> float:
    """Return the time that ``active`` distinct deltas add to a decode step of ``rows`` sequences. Estimated.

    Interpolated between what was timed. Fewer than 32 rows count as 32; beyond 128 rows and 32 deltas the last
    slope goes on. Below one, ``active`` is the share of steps with one delta.

    Args:
        delta_bytes: of one delta, embeddings included.
    """
    if not active or not rows:
        return 0.0
    of_32 = _along(active, _DELTAS, _MS_OF_32_ROWS)
    of_128 = _along(active, _DELTAS, _MS_OF_128_ROWS)
    added_ms = of_32 + (of_128 - of_32) * max(0.0, rows - 32) / (128 - 32)
    return min(1.0, active) * _scaled_s(added_ms, delta_bytes)


def delta_prompt_s(delta_bytes: float, tokens: float) -> float:
    """Return the time that ``tokens`` of prompts of one delta add to a step. Estimated; merging bounds it."""
    return _scaled_s(_along(tokens, _PROMPT_ROWS, _PROMPT_MS), delta_bytes) if tokens else 0.0


def _along(value: float, places: tuple[float, ...], times_ms: tuple[float, ...]) -> float:
    """Return the time at ``value``: that of the first place before it, and the last slope beyond the last."""
    beyond = max(0.0, value - places[-1]) / (places[-1] - places[-2])
    return float(np.interp(value, places, times_ms)) + beyond * (times_ms[-1] - times_ms[-2])


def _scaled_s(measured_ms: float, delta_bytes: float) -> float:
    return measured_ms * 1e-3 * delta_bytes / MEASURED_DELTA_BYTES
