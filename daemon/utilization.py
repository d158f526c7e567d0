"""Load of a device lately: window arithmetic, no clock and no device.

Workers report counters of busy seconds; two readings make a sample, and the samples of the last 120 s make a load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

__all__ = ["BusyCounter", "LoadWindow", "union_fraction"]


def union_fraction(fractions: Iterable[float]) -> float:
    """Return the part of an interval in which at least one of several workers was busy, from the part each was.

    Counters do not say how the busy moments overlap: the union lies between the largest part and the (clipped)
    sum. This takes the moments for independent, 1 - prod(1 - f): exact for one worker and for one always busy.
    """
    return 1.0 - prod(1.0 - min(1.0, max(0.0, fraction)) for fraction in fractions)


@dataclass(slots=True)
class BusyCounter:
    """Busy-seconds counter of one worker on one device, read again and again."""

    _at_s: float | None = None
    _busy_s: float = 0.0

    def fraction_since_last(self, at_s: float, busy_s: float) -> float | None:
        """Return the busy part of the time since the last reading, 0 to 1; None for the first or no time passed.

        A counter that went down belongs to a worker that started anew: what it shows was all done since.
        """
        before_s, before_busy_s = self._at_s, self._busy_s
        if before_s is not None and at_s <= before_s:
            return None
        self._at_s, self._busy_s = at_s, busy_s
        if before_s is None:
            return None
        done_s = busy_s - before_busy_s if busy_s >= before_busy_s else busy_s
        return min(1.0, max(0.0, done_s / (at_s - before_s)))


@dataclass(slots=True)
class LoadWindow:
    """Busy fraction over the last ``window_s`` seconds that were observed.

    Time without observation counts neither as busy nor as idle.
    """

    window_s: float = 120.0
    _samples: deque[tuple[float, float, float]] = field(default_factory=deque)  # from, to, fraction

    def add(self, from_s: float, to_s: float, fraction: float) -> None:
        """Note that the device was busy for ``fraction`` of an interval later than all earlier ones.

        Raises:
            ValueError: the interval is empty or overlaps the one before, or ``fraction`` is not in [0, 1].
        """
        if not from_s < to_s or (self._samples and from_s < self._samples[-1][1]):
            raise ValueError(f"interval {from_s}..{to_s} is empty or overlaps the one before")
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction must be in [0, 1], got {fraction}")
        self._samples.append((from_s, to_s, fraction))
        while self._samples[0][1] <= to_s - self.window_s:
            self._samples.popleft()

    def load_fraction(self, now_s: float) -> float:
        """Return busy over observed seconds, both within the window that ends at ``now_s``; 0 without samples."""
        begin_s = now_s - self.window_s
        observed_s = busy_s = 0.0
        for from_s, to_s, fraction in self._samples:
            length_s = min(to_s, now_s) - max(from_s, begin_s)
            if length_s > 0:
                observed_s += length_s
                busy_s += length_s * fraction
        return min(1.0, busy_s / observed_s) if observed_s else 0.0
