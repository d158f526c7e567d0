"""Arrival processes: seeded sources of arrival times without end, a chunk at a time.

All are one construction: points whose gaps are independent, of mean 1 and a given coefficient of variation
(gamma law; 1 is Poisson), run through a clock that goes as fast as the rate at that moment. With cv 1 the result
is exactly the Poisson process of that rate; with another, the gaps keep their cv wherever the rate is constant
over a few of them.

Source: time rescaling; Cox and Isham, Point Processes, 1980, sections 3.2 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import ConfigError

__all__ = [
    "ArrivalProcess",
    "Diurnal",
    "Drifting",
    "Gamma",
    "OnOff",
    "Poisson",
    "RateSeries",
    "Seconds",
]

Seconds: TypeAlias = NDArray[np.float64]
_CHUNK = 4096
# Gamma gaps of a larger one are below what a float holds, and the clock would stop.
_MAX_CV = 1000.0


class ArrivalProcess(Protocol):
    """Source of the arrival times of requests."""

    def arrivals(self, rng: np.random.Generator) -> Iterator[Seconds]:
        """Yield ascending times from 0 on, in arrays of any length; without end unless the process says so."""
        ...


@dataclass(frozen=True)
class Gamma:
    """Independent gamma-distributed gaps of mean ``1 / rate_per_s`` and coefficient of variation ``cv``.

    The law of a shape of 1/cv^2. Clockwork and AlpaServe vary burstiness so. The first gap begins at 0.
    """

    rate_per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _require(rate_per_s=self.rate_per_s, cv=self.cv)

    def arrivals(self, rng: np.random.Generator) -> Iterator[Seconds]:
        return _run(iter([_Span(math.inf, self.rate_per_s)]), self.cv, rng)


def Poisson(rate_per_s: float) -> Gamma:
    """Return exponential gaps: arrivals that know nothing of each other."""
    return Gamma(rate_per_s)


@dataclass(frozen=True)
class OnOff:
    """A source that is on for a while, then off for a while: the Markov-modulated process of two states.

    Stays are exponential, arrivals within them have ``rate_per_s`` or ``off_rate_per_s``; it begins in the state
    that the odds of the two means give. Two departures from Markov, both off by default, are there because a real
    source needed them (Azure code): the rate of one burst differs from the next's (gamma law, ``rate_cv``), and
    off stays may vary more than exponential ones (``off_cv``). ``cv`` is that of the gaps within a stay.
    """

    rate_per_s: float
    on_s: float
    off_s: float
    off_rate_per_s: float = 0.0
    cv: float = 1.0
    rate_cv: float = 0.0
    off_cv: float = 1.0

    def __post_init__(self) -> None:
        _require(rate_per_s=self.rate_per_s, on_s=self.on_s, off_s=self.off_s, cv=self.cv, off_cv=self.off_cv)
        _require_at_least_0(off_rate_per_s=self.off_rate_per_s, rate_cv=self.rate_cv)

    def arrivals(self, rng: np.random.Generator) -> Iterator[Seconds]:
        spans_rng, points_rng = rng.spawn(2)
        return _run(self._spans(spans_rng), self.cv, points_rng)

    def _spans(self, rng: np.random.Generator) -> Iterator[_Span]:
        is_on = rng.random() < self.on_s / (self.on_s + self.off_s)
        while True:
            if is_on:
                yield _Span(rng.exponential(self.on_s), self.rate_per_s * _gamma(rng, self.rate_cv))
            else:
                yield _Span(self.off_s * _gamma(rng, self.off_cv), self.off_rate_per_s)
            is_on = not is_on


@dataclass(frozen=True)
class Drifting:
    """Rate that wanders about its mean: its logarithm is an AR(1) process over slots of ``slot_s``.

    ``modulation_cv`` is the rate's own coefficient of variation (lognormal), ``correlation_s`` the time in which
    the logarithm's correlation falls to 1/e; ``cv`` is that of the gaps at a constant rate.
    """

    rate_per_s: float
    modulation_cv: float
    correlation_s: float
    cv: float = 1.0
    slot_s: float = 10.0

    def __post_init__(self) -> None:
        _require(rate_per_s=self.rate_per_s, correlation_s=self.correlation_s, cv=self.cv, slot_s=self.slot_s)
        _require(modulation_cv=self.modulation_cv)

    def arrivals(self, rng: np.random.Generator) -> Iterator[Seconds]:
        spans_rng, points_rng = rng.spawn(2)
        return _run(self._spans(spans_rng), self.cv, points_rng)

    def _spans(self, rng: np.random.Generator) -> Iterator[_Span]:
        log_std = math.sqrt(math.log1p(self.modulation_cv**2))
        kept = math.exp(-self.slot_s / self.correlation_s)
        level = rng.standard_normal()
        while True:
            yield _Span(self.slot_s, self.rate_per_s * math.exp(log_std * level - log_std**2 / 2))
            level = kept * level + math.sqrt(1 - kept**2) * rng.standard_normal()


@dataclass(frozen=True)
class RateSeries:
    """Measured rate: ``rates_per_s[i]`` holds from ``i * slot_s`` for one slot.

    The series ends with its last slot unless ``repeats``.
    """

    slot_s: float
    rates_per_s: tuple[float, ...]
    cv: float = 1.0
    repeats: bool = False

    def __post_init__(self) -> None:
        _require(slot_s=self.slot_s, cv=self.cv)
        if not any(rate > 0 for rate in self.rates_per_s):
            raise ConfigError("a rate series needs at least one slot with a rate above 0")
        for index, rate in enumerate(self.rates_per_s):
            if not (math.isfinite(rate) and rate >= 0):
                raise ConfigError(f"the rate of slot {index} is {rate}; it must be finite and at least 0")

    def arrivals(self, rng: np.random.Generator) -> Iterator[Seconds]:
        return _run(self._spans(), self.cv, rng)

    def _spans(self) -> Iterator[_Span]:
        while True:
            for rate in self.rates_per_s:
                yield _Span(self.slot_s, rate)
            if not self.repeats:
                return


@dataclass(frozen=True)
class Diurnal:
    """A daily swing: ``rate_per_s * (1 + amplitude * sin(2 pi (t / period_s - phase)))``, lowest at 0 by default.

    A staircase of 288 steps, each the sine's mean over it (5 minutes of a day).
    """

    rate_per_s: float
    amplitude: float
    period_s: float = 86_400.0
    phase: float = 0.25
    cv: float = 1.0

    def __post_init__(self) -> None:
        _require(rate_per_s=self.rate_per_s, period_s=self.period_s, cv=self.cv)
        if not 0 <= self.amplitude <= 1:
            raise ConfigError(f"amplitude must be in [0, 1] so that the rate stays above 0, got {self.amplitude}")
        if not math.isfinite(self.phase):
            raise ConfigError(f"phase must be a finite share of a period, got {self.phase}")

    @property
    def series(self) -> RateSeries:
        """The rates of one period, repeated."""
        edges = 2 * np.pi * (np.arange(289) / 288 - self.phase)
        means = -np.diff(np.cos(edges)) / np.diff(edges)
        rates = np.maximum(0.0, self.rate_per_s * (1 + self.amplitude * means))
        return RateSeries(self.period_s / 288, tuple(rates.tolist()), self.cv, repeats=True)

    def arrivals(self, rng: np.random.Generator) -> Iterator[Seconds]:
        return self.series.arrivals(rng)


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of time with one rate."""

    duration_s: float
    rate_per_s: float


def _run(spans: Iterator[_Span], cv: float, rng: np.random.Generator) -> Iterator[Seconds]:
    """Yield points of rate 1 through the clock of the spans: within each, time is points divided by the rate."""
    points, taken = np.empty(0), 0
    last_point = 0.0
    start_s, start_point = 0.0, 0.0
    for span in spans:
        end_s = start_s + span.duration_s
        if span.rate_per_s > 0:
            end_point = start_point + span.duration_s * span.rate_per_s
            while True:
                upto = int(np.searchsorted(points, end_point))
                if upto > taken:
                    times = start_s + (points[taken:upto] - start_point) / span.rate_per_s
                    yield np.minimum(times, end_s)  # rounding must not carry one past the span's end
                taken = upto
                if upto < len(points):
                    break
                points, taken = last_point + np.cumsum(_gamma_array(rng, cv, _CHUNK)), 0
                last_point = float(points[-1])
            start_point = end_point
        start_s = end_s


def _gamma_array(rng: np.random.Generator, cv: float, count: int) -> Seconds:
    """Return gamma-distributed numbers of mean 1 and the given coefficient of variation."""
    return rng.gamma(1 / cv**2, cv**2, count)


def _gamma(rng: np.random.Generator, cv: float) -> float:
    return float(_gamma_array(rng, cv, 1)[0]) if cv > 0 else 1.0


def _require(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be finite and above 0, got {value}")
        if name.endswith("cv") and value > _MAX_CV:
            raise ConfigError(f"{name} must be at most {_MAX_CV:g}, got {value}; its gaps would all be 0")


def _require_at_least_0(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be finite and at least 0, got {value}")
