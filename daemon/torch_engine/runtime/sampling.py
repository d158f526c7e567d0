"""From a row of logits to the next token.

Each sequence draws from a generator of its own, one number per token, so a seed gives the same choices whatever
else is in the batch. Knows nothing of sequences' ends or of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fingerprint.errors import ConfigError

__all__ = ["Sampler", "SamplingParams", "sample"]

_GREEDY_BELOW = 1e-5  # a temperature under this is greedy: the quotient would only overflow
_BLOCK = 512  # tokens; near the square root of a large vocabulary
_BAND = math.exp(-2)  # likeliest tokens are looked for in bands of weight, each this much lighter than the last
_LIGHTEST = 1e-7  # where bands stop to pay: some passes over all weights cost as much as one partition


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of choosing tokens. ``seed`` None draws a fresh one."""

    temperature: float = 1.0
    top_p: float = 1.0  # smallest set of tokens whose probability reaches this
    top_k: int = 0  # 0: all
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise ConfigError(f"temperature must be between 0 and 100, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be at least 0, got {self.top_k}")

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1


class Sampler:
    """Sampler of one sequence: parameters, its generator, and tokens that are barred for now."""

    __slots__ = ("_random", "params")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        seed = None if params.seed is None else params.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(seed))

    def choose(self, logits_V: np.ndarray) -> int:
        """Draw a token from one row of logits, at least one of them finite, none NaN."""
        params = self.params
        weights = np.exp((logits_V - logits_V.max()) * np.float32(1 / params.temperature))
        if params.top_k and params.top_k < len(weights):
            weights[weights < _kth_largest(weights, params.top_k)] = 0.0
        if params.top_p < 1:
            weights = _nucleus(weights, params.top_p)
        return _pick(weights, self._random.random())


def _pick(weights_V: np.ndarray, fraction: float) -> int:
    """Return the token at ``fraction`` (0 to 1, exclusive) of the weights laid end to end.

    In order of token ids, not of probability: rounding then moves a boundary, never swaps two tokens. First among
    blocks, then within one, as a running sum over a whole vocabulary takes milliseconds.
    """
    sums = np.add.reduceat(weights_V, np.arange(0, len(weights_V), _BLOCK), dtype=np.float64)
    block, rest = _reach(np.cumsum(sums), fraction * float(sums.sum()))
    first = block * _BLOCK
    within, _ = _reach(np.cumsum(weights_V[first : first + _BLOCK], dtype=np.float64), rest)
    return first + within


def _reach(cumulative: np.ndarray, target: float) -> tuple[int, float]:
    """Return the first entry to exceed ``target``, never an empty one, and how far ``target`` is into it."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index == len(cumulative):  # by rounding: then the last that adds anything
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index, target - (float(cumulative[index - 1]) if index else 0.0)


def _kth_largest(weights_V: np.ndarray, k: int) -> float:
    """Return the k-th largest weight, without partitioning all weights where that can be avoided.

    A partition of all weights takes milliseconds for a large vocabulary, most of which never matter.
    """
    low = float(weights_V.max())
    likely = weights_V[:0]
    while len(likely) < k and low > _LIGHTEST:
        low *= _BAND
        likely = weights_V[weights_V >= low]
    return np.partition(likely if len(likely) >= k else weights_V, -k)[-k]


def _nucleus(weights_V: np.ndarray, top_p: float) -> np.ndarray:
    """Return the weights with all but the likeliest tokens set to 0: those needed to reach ``top_p`` of the whole.

    Only the band of weights in which ``top_p`` is reached has to be sorted; what is above it is needed as it is.
    """
    # All tokens below (1 - top_p) / V of the whole weigh less than 1 - top_p together: none of them is needed.
    total = float(weights_V.sum(dtype=np.float64))
    lightest = (1 - top_p) / len(weights_V) * total
    candidates = np.flatnonzero(weights_V >= lightest)
    weights = weights_V[candidates]
    high, low, above = math.inf, float(weights.max()) * _BAND, 0.0
    while True:
        band = np.flatnonzero((weights >= low) & (weights < high))
        mass = float(weights[band].sum(dtype=np.float64))
        if low <= lightest or above + mass >= top_p * total:
            break
        high, low, above = low, low * _BAND, above + mass
    order = band[np.argsort(-weights[band], kind="stable")]
    cumulative = above + np.cumsum(weights[order], dtype=np.float64)
    keep = int(np.searchsorted(cumulative, top_p * total, side="left")) + 1
    needed = candidates[np.concatenate((np.flatnonzero(weights >= high), order[:keep]))]
    kept = np.zeros_like(weights_V)
    kept[needed] = weights_V[needed]
    return kept


def sample(
    logits_NV: np.ndarray, samplers: Sequence[Sampler], barred: Sequence[Sequence[int]]
) -> list[int | None]:
    """Return the next token of each sequence.

    Args:
        logits_NV: float32, one row per sequence; changed in place at the barred tokens.
        samplers: one per row.
        barred: per row, token ids that must not be chosen (ends of sequence before ``min_tokens``).

    Returns:
        Per row the token, or None where the logits are not numbers (NaN, or infinity as the largest): the model
        has failed on that sequence.
    """
    vocab = logits_NV.shape[1] if len(samplers) else 0
    for row, tokens in enumerate(barred):
        if tokens:
            logits_NV[row, [token for token in tokens if 0 <= token < vocab]] = -np.inf
    best_N = logits_NV.argmax(axis=1) if len(samplers) else np.empty(0, dtype=np.int64)
    chosen: list[int | None] = []
    for row, sampler in enumerate(samplers):
        best = int(best_N[row])
        if not math.isfinite(logits_NV[row, best]):
            chosen.append(None)
        else:
            chosen.append(best if sampler.params.greedy else sampler.choose(logits_NV[row]))
    return chosen
