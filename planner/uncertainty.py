"""Laws over the truth that intervals of estimates are taken for, for many configurations at once. Pure.

Lognormal on each side of the value, a twentieth beyond either end of the interval.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fingerprint.queueing import Column, Rows
from planner.costs import Figures
from planner.normal_distribution import Z_OF_INTERVAL

__all__ = ["Intervals", "Uncertainty"]

_TINY = 1e-300


class Uncertainty(NamedTuple):
    """Widths of the lognormal law of a truth, below and above the value."""

    below: Column
    above: Column

    @classmethod
    def of(cls, value: Column, low: Column, high: Column) -> Uncertainty:
        value = np.maximum(value, _TINY)
        below = np.log(value / np.maximum(low, value * 1e-3))
        return cls(np.maximum(below, 0.0) / Z_OF_INTERVAL, np.log(np.maximum(high / value, 1.0)) / Z_OF_INTERVAL)

    def of_less(self, ratio: Column) -> Uncertainty:
        """Return the law of ``ratio`` times the value: the lower end stays, the upper one keeps its ratio."""
        return self._replace(below=np.maximum(self.below + np.log(ratio) / Z_OF_INTERVAL, 0.0))

    def factor(self, z: Column) -> Column:
        """Return truth over value, z standard deviations from the middle."""
        return np.asarray(np.exp(np.where(z > 0, self.above, self.below) * z))

    def z_of(self, ratio: Column) -> Column:
        """Return the z at which the truth is ``ratio`` times the value; infinite where it cannot be."""
        logarithm = np.log(np.maximum(ratio, _TINY))
        width = np.where(logarithm > 0, self.above, self.below)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = logarithm / width
        return np.where(width > 0, z, np.where(logarithm >= 0, np.inf, -np.inf))


class Intervals(NamedTuple):
    """Uncertainty of TTFT (of a request alone), TPOT and E2E, and the upper ends of these of a request alone."""

    uncertainties: tuple[Uncertainty, ...]
    alone_high_s: tuple[Column, ...]

    @classmethod
    def of(cls, full: Figures, alone: Column) -> Intervals:
        """Return the intervals of whole batches, and of requests alone by ``_alone``'s figures."""
        ttft_s, low_s, high_s, _, tpot_high_s = alone
        more, batch_s = full.output_tokens - 1, full.ttft_s + (full.output_tokens - 1) * full.tpot_s
        low_e2e_s, high_e2e_s = (t + more * step for t, step in (
            (full.ttft_low_s, full.tpot_low_s), (full.ttft_high_s, full.tpot_high_s)))  # fmt: skip
        uncertainties = (
            Uncertainty.of(ttft_s, low_s, high_s),
            Uncertainty.of(full.tpot_s, full.tpot_low_s, full.tpot_high_s),
            Uncertainty.of(batch_s, low_e2e_s, high_e2e_s),
        )
        return cls(uncertainties, (high_s, tpot_high_s, high_s + more * tpot_high_s))

    def with_less(self, ratio: Column) -> Intervals:
        """Return the intervals where E2E is ``ratio`` times as long, of which its lower end has nothing."""
        ttft, tpot, e2e = self.uncertainties
        return self._replace(uncertainties=(ttft, tpot, e2e.of_less(ratio)))

    def take(self, rows: Rows) -> Intervals:
        taken = (Uncertainty(one.below[rows], one.above[rows]) for one in self.uncertainties)
        return Intervals(tuple(taken), tuple(column[rows] for column in self.alone_high_s))
