"""The one statistic for repeated timings: a trimmed mean with a t interval.

Why the 20% trimmed mean: an operating system adds delays, never removes them, so a plain mean follows its worst
runs; the minimum has no interval and describes a run that no user gets; the median of few runs wastes a third of
them. With fewer than five runs nothing is trimmed and this is the plain mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["TRIM_FRACTION", "Location", "locate", "t_quantile_95"]

TRIM_FRACTION = 0.2  # from each end

# Student's t, 95th percentile (so +-t is the 90% interval), by degrees of freedom; smooth in 1/dof between.
_T95 = (
    (1, 6.3138), (2, 2.9200), (3, 2.3534), (4, 2.1318), (5, 2.0150), (6, 1.9432), (8, 1.8595), (10, 1.8125),
    (15, 1.7531), (20, 1.7247), (30, 1.6973), (60, 1.6706), (math.inf, 1.6449),
)  # fmt: skip


def t_quantile_95(dof: float) -> float:
    """Return the half-width of a 90% interval in standard errors; ``dof`` may be fractional, below 1 it counts as
    1.

    Source: the table of Student's t, interpolated linearly in 1/dof (within 1% of the exact value from 2 up).
    """
    inverse = [1 / d for d, _ in reversed(_T95)]
    return float(np.interp(1 / max(dof, 1.0), inverse, [t for _, t in reversed(_T95)]))


@dataclass(frozen=True, slots=True)
class Location:
    """Location of repeated values. One value alone has the standard error ``inf`` and 0 degrees of freedom."""

    value: float
    standard_error: float
    dof: int

    @property
    def half_width(self) -> float:
        """Half of the 90% interval."""
        return t_quantile_95(self.dof) * self.standard_error if self.dof else math.inf


def locate(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> Location:
    """Return the trimmed mean of at least one value, its standard error and degrees of freedom.

    Source: Tukey and McLaughlin (1963): the standard error is that of the winsorized values over
    ``(1 - 2g/n) * sqrt(n)``, with ``n - 2g - 1`` degrees of freedom, g values trimmed from each end.
    """
    # Plain floats: a few runs are too few for array operations to pay.
    ordered = sorted(values.tolist() if isinstance(values, np.ndarray) else map(float, values))
    n = len(ordered)
    if n == 0:
        raise ValueError("no values to locate")
    g = int(TRIM_FRACTION * n)
    kept = ordered[g : n - g]
    value = math.fsum(kept) / len(kept)
    if n == 1:
        return Location(value, math.inf, 0)
    winsorized = [kept[0]] * g + kept + [kept[-1]] * g
    mean = math.fsum(winsorized) / n
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in winsorized) / (n - 1))
    return Location(value, deviation / ((1 - 2 * g / n) * math.sqrt(n)), n - 2 * g - 1)
