"""Scales and ticks: from values to positions in a drawing, and the round numbers between."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Scale", "linear", "linear_ticks", "log_ticks", "spread"]

_LOG_FROM = 8.0  # largest over smallest value from which a logarithmic axis reads better


@dataclass(frozen=True, slots=True)
class Scale:
    """Values ``low..high`` on positions ``start..end`` (SVG: a vertical one runs downwards)."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position; a value outside is drawn at the edge."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside, about ``count``."""
        if self.logarithmic:
            return log_ticks(self.low, self.high, count)
        return linear_ticks(self.low, self.high, count)


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Return a linear scale; equal ends are spread, so that it can always be drawn."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    return Scale(low, high, start, end)


def spread(values: list[float], start: float, end: float) -> Scale:
    """Return a scale around positive ``values`` with some air: logarithmic when they span a lot, else linear."""
    low, high = min(values), max(values)
    if high / low >= _LOG_FROM:
        air = (high / low) ** 0.06
        return Scale(low / air, high * air, start, end, logarithmic=True)
    air = 0.08 * (high - low) or 0.3 * high
    return Scale(max(low - air, 0.0), high + air, start, end)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten inside ``low..high``."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return powers of ten inside, with their twos and fives where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(found) <= count + 2:
            return found
    return found[:: math.ceil(len(found) / count)]
