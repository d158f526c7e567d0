"""Log-probabilities of a token that is given, and of the likeliest tokens in its place, from a row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["MAX_TOP", "TokenScore", "score"]

MAX_TOP = 20  # likeliest tokens, as vLLM allows unless it is started otherwise
_LOWEST = -9999.0  # in place of minus infinity, which JSON has not; vLLM's number


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Natural logarithms of probabilities."""

    logprob: float  # of the given token
    top: tuple[tuple[int, float], ...]  # likeliest tokens, the likeliest first


def score(logits_V: np.ndarray, token: int, top: int) -> TokenScore:
    """Return the score of ``token`` by a row of logits, at least one of them finite, none NaN."""
    highest = logits_V.max()
    total = np.log(np.exp(logits_V - highest, dtype=np.float64).sum())
    best = np.arange(len(logits_V) if top else 0)  # sorting a vocabulary takes as long as a step
    if 0 < top < len(logits_V):
        best = np.argpartition(logits_V, -top)[-top:]
    best = best[np.lexsort((best, -logits_V[best]))][:top]

    def logprob(index: int) -> float:
        return max(_LOWEST, float(logits_V[index] - highest - total))

    return TokenScore(logprob(token), tuple((int(index), logprob(index)) for index in best))
