"""Popularity laws of the literature: the choice of each request's model, where the trace does not name it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import ConfigError

__all__ = [
    "Distinct",
    "Geometric",
    "Identical",
    "Indexes",
    "Popularity",
    "Uniform",
    "Zipf",
    "popularity_named",
]

Indexes: TypeAlias = NDArray[np.int64]


class Popularity(Protocol):
    """A law over models, the most popular first."""

    def draw(self, rng: np.random.Generator, first: int, count: int, models: int) -> Indexes:
        """Return model indexes, below ``models``, of the requests number ``first`` to ``first + count - 1``."""
        ...


@dataclass(frozen=True)
class Zipf:
    """The i-th model's share is proportional to ``1 / i^alpha`` (DeltaZip: alpha 1.5; larger is more skewed)."""

    alpha: float = 1.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError(f"zipf's alpha must be finite and at least 0, got {self.alpha}")

    def draw(self, rng: np.random.Generator, first: int, count: int, models: int) -> Indexes:
        return _weighted(rng, np.arange(1.0, models + 1) ** -self.alpha, count)


@dataclass(frozen=True)
class Geometric:
    """Each model has ``ratio`` times the requests of the next: what Punica calls Skewed, or Zipf-1.5."""

    ratio: float = 1.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"the ratio must be finite and at least 1, got {self.ratio}")

    def draw(self, rng: np.random.Generator, first: int, count: int, models: int) -> Indexes:
        return _weighted(rng, self.ratio ** -np.arange(float(models)), count)


@dataclass(frozen=True)
class Uniform:
    """Every model as popular as any other. Punica takes ceil(sqrt(n)) models for n requests."""

    def draw(self, rng: np.random.Generator, first: int, count: int, models: int) -> Indexes:
        return rng.integers(models, size=count)


@dataclass(frozen=True)
class Identical:
    """All requests for the first model."""

    def draw(self, rng: np.random.Generator, first: int, count: int, models: int) -> Indexes:
        return np.zeros(count, dtype=np.int64)


@dataclass(frozen=True)
class Distinct:
    """Each request for another model: one after the other, and around again after the last.

    Punica has as many models as requests; with fewer, as many requests in a row as there are models share none.
    """

    def draw(self, rng: np.random.Generator, first: int, count: int, models: int) -> Indexes:
        return np.arange(first, first + count) % models


_PLAIN: dict[str, Popularity] = {
    "uniform": Uniform(),
    "even": Uniform(),
    "identical": Identical(),
    "distinct": Distinct(),
    "zipf": Zipf(),
    "geometric": Geometric(),
}


def popularity_named(text: str) -> Popularity:
    """Return a law by name: ``uniform``, ``identical``, ``distinct``, ``zipf[:ALPHA]`` or ``geometric[:RATIO]``.

    ``even`` is ``uniform``, as plans name it.

    Raises:
        ConfigError: no such law, or its number is not one or is out of range.
    """
    name, _, number = text.partition(":")
    if name not in _PLAIN or (number and name not in ("zipf", "geometric")):
        raise ConfigError(
            f"there is no popularity {text!r}; "
            "there are uniform, identical, distinct, zipf[:ALPHA] and geometric[:RATIO]"
        )
    if not number:
        return _PLAIN[name]
    try:
        value = float(number)
    except ValueError as error:
        raise ConfigError(f"popularity {text!r}: {number!r} is not a number") from error
    return Zipf(value) if name == "zipf" else Geometric(value)


def _weighted(rng: np.random.Generator, weights: NDArray[np.float64], count: int) -> Indexes:
    edges = np.cumsum(weights)
    drawn: Indexes = np.searchsorted(edges, rng.random(count) * edges[-1], side="right")
    return drawn.clip(max=len(weights) - 1)  # the last edge itself, by rounding
