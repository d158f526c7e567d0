"""Models of prompt and answer lengths: seeded, both lengths at once, fitted to a trace or given.

Memory of a fit is bounded whatever the trace's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import BadInputError, ConfigError
from traces.request import Request
from traces.request_arrays import Moments, blocks

__all__ = [
    "EmpiricalLengths",
    "FixedLengths",
    "HistogramLengths",
    "LengthModel",
    "LognormalLengths",
    "MixedLengths",
    "QuantileLengths",
    "Tokens",
]

Tokens: TypeAlias = NDArray[np.int64]


class LengthModel(Protocol):
    """Source of the lengths of requests."""

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        """Return the input and output tokens of ``count`` requests, each at least 1."""
        ...


@dataclass(frozen=True)
class FixedLengths:
    """Every request alike."""

    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if min(self.input_tokens, self.output_tokens) < 1:
            raise ConfigError(f"a request has at least 1 token each way, got {self}")

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        return np.full(count, self.input_tokens), np.full(count, self.output_tokens)


@dataclass(frozen=True, eq=False)
class EmpiricalLengths:
    """Requests of a trace drawn again, input and output of one request together."""

    input_tokens: Tokens
    output_tokens: Tokens

    def __post_init__(self) -> None:
        if not 0 < len(self.input_tokens) == len(self.output_tokens):
            raise ConfigError("empirical lengths need as many outputs as inputs, at least one")

    @classmethod
    def fit(cls, requests: Iterable[Request], *, max_kept: int = 100_000, seed: int = 0) -> EmpiricalLengths:
        """Keep up to ``max_kept`` requests, every one with the same chance (Vitter's reservoir, algorithm R)."""
        rng = np.random.default_rng(seed)
        kept: list[tuple[int, int]] = []
        slots: list[int] = []
        for index, request in enumerate(requests):
            if index < max_kept:
                kept.append((request.input_tokens, request.output_tokens))
                continue
            if not slots:  # the slots of the next thousand at once: one number at a time is ten times slower
                slots = rng.integers(np.arange(index, index + 1000) + 1).tolist()[::-1]
            if (slot := slots.pop()) < max_kept:
                kept[slot] = (request.input_tokens, request.output_tokens)
        if not kept:
            raise BadInputError("lengths cannot be fitted to a trace without requests")
        both = np.array(kept, dtype=np.int64)
        return cls(both[:, 0].copy(), both[:, 1].copy())

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        drawn = rng.integers(len(self.input_tokens), size=count)
        return self.input_tokens[drawn], self.output_tokens[drawn]


@dataclass(frozen=True)
class LognormalLengths:
    """Logarithms of both lengths jointly normal; rounded up, at most the longest seen.

    Long prompts and answers of chat are near it; a distribution with spikes (templates, a limit that many answers
    reach) is not (docs/traces.md).
    """

    log_mean_input: float
    log_std_input: float
    log_mean_output: float
    log_std_output: float
    log_correlation: float = 0.0
    max_input_tokens: int = 10**9
    max_output_tokens: int = 10**9

    def __post_init__(self) -> None:
        if not (self.log_std_input >= 0 and self.log_std_output >= 0 and -1 <= self.log_correlation <= 1):
            raise ConfigError(f"deviations must be at least 0 and the correlation in [-1, 1], got {self}")

    @classmethod
    def fit(cls, requests: Iterable[Request]) -> LognormalLengths:
        """Fit by moments of the logarithms, in one pass; half a token is taken off for the rounding up."""
        logs, longest = Moments(2), np.ones(2, dtype=np.int64)
        for block in blocks(requests):
            logs.add(np.log(np.maximum(block.tokens, 1) - 0.5))
            longest = np.maximum(longest, block.tokens.max(0))
        if logs.count == 0:
            raise BadInputError("lengths cannot be fitted to a trace without requests")
        (input_mean, output_mean), (input_std, output_std) = logs.mean.tolist(), logs.std.tolist()
        return cls(input_mean, input_std, output_mean, output_std, logs.correlation, *longest.tolist())

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        first, second = rng.standard_normal((count, 2)).T
        second = self.log_correlation * first + math.sqrt(1 - self.log_correlation**2) * second
        return (
            _whole(np.exp(self.log_mean_input + self.log_std_input * first), self.max_input_tokens),
            _whole(np.exp(self.log_mean_output + self.log_std_output * second), self.max_output_tokens),
        )


@dataclass(frozen=True)
class QuantileLengths:
    """Each length from its quantiles, straight lines between them; input and output independent.

    For workloads of which only quantiles are known. Each table is ascending ``(fraction, tokens)`` from fraction 0
    to fraction 1.
    """

    input_quantiles: tuple[tuple[float, float], ...]
    output_quantiles: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        for table in (self.input_quantiles, self.output_quantiles):
            fractions, tokens = zip(*table, strict=True) if table else ((), ())
            if len(table) < 2 or fractions[0] != 0 or fractions[-1] != 1 or tokens[0] < 1:
                raise ConfigError("quantiles must reach from fraction 0 to fraction 1, with at least 1 token")
            if list(fractions) != sorted(fractions) or list(tokens) != sorted(tokens):
                raise ConfigError("quantiles must ascend, fractions and tokens both")

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        uniform = rng.random((count, 2))
        return _at(uniform[:, 0], self.input_quantiles), _at(uniform[:, 1], self.output_quantiles)


@dataclass(frozen=True, eq=False)
class HistogramLengths:
    """Each length from its own histogram: values and their cumulative shares."""

    inputs: tuple[Tokens, NDArray[np.float64]]
    outputs: tuple[Tokens, NDArray[np.float64]]

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        uniform = rng.random((count, 2))
        drawn = []
        for column, (values, upto) in enumerate((self.inputs, self.outputs)):
            at = np.searchsorted(upto, uniform[:, column] * upto[-1], side="right")
            drawn.append(values[at.clip(max=len(values) - 1)])
        return drawn[0], drawn[1]


@dataclass(frozen=True, eq=False)
class MixedLengths:
    """Mixture of length models: each request draws one of them by weight."""

    parts: tuple[tuple[float, LengthModel], ...]

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        edges = np.cumsum([weight for weight, _ in self.parts])
        chosen = np.searchsorted(edges, rng.random(count) * edges[-1], side="right").clip(max=len(edges) - 1)
        both = np.empty((count, 2), dtype=np.int64)
        order = np.argsort(chosen, kind="stable")
        start = 0
        for index, mine in zip(*np.unique(chosen, return_counts=True), strict=True):
            part = self.parts[int(index)][1]
            both[order[start : start + mine]] = np.stack(part.sample(rng, int(mine)), axis=1)
            start += mine
        return both[:, 0], both[:, 1]


def _at(uniform: NDArray[np.float64], table: tuple[tuple[float, float], ...]) -> Tokens:
    fractions, tokens = zip(*table, strict=True)
    lengths: Tokens = np.rint(np.interp(uniform, fractions, tokens)).astype(np.int64)
    return lengths.clip(min=1)


def _whole(lengths: NDArray[np.float64], longest: int) -> Tokens:
    return np.clip(np.ceil(lengths), 1, longest).astype(np.int64)
