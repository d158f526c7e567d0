"""Outcomes by the handful, for tests of what is made of them."""

from __future__ import annotations

import numpy as np

from traces.outcomes import Failure, Outcomes


def outcomes(
    *,
    ttft_s: list[float],
    e2e_s: list[float],
    output_tokens: list[int] | None = None,
    failure: list[Failure] | None = None,
    late_s: float = 0.0,
    gaps: list[list[float]] | None = None,
    deployment: list[int] | None = None,
) -> Outcomes:
    """Requests scheduled one second apart, each sent ``late_s`` late; latencies count from the schedule."""
    n = len(ttft_s)
    scheduled_s = np.arange(n, dtype=float)
    tokens = np.array([10] * n if output_tokens is None else output_tokens)
    names = ("a", "b") if deployment else ("a",)
    return Outcomes(
        deployments=names,
        deployment=np.array(deployment or [0] * n),
        arrival_s=scheduled_s,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s + late_s,
        first_token_s=scheduled_s + np.array(ttft_s, dtype=float),
        last_token_s=scheduled_s + np.array(e2e_s, dtype=float),
        asked_input_tokens=np.full(n, 100),
        asked_output_tokens=tokens,
        input_tokens=np.full(n, 100),
        output_tokens=tokens,
        failure=np.array(failure or [Failure.NONE] * n),
        gaps_s=np.array([gap for row in gaps or [] for gap in row], dtype=float),
        num_gaps=None if gaps is None else np.array([len(row) for row in gaps]),
    )
