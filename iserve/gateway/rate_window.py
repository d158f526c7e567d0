"""Request rate of a deployment over the last 120 s, the window of the daemon's loads."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["WINDOW_S", "RateWindow"]

WINDOW_S = 120
_LEAST_S = 30.0  # of a second after a start one request would be a rate of one a second


class RateWindow:
    """Counts by the second, in constant memory.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._counts = [0] * WINDOW_S
        self._second = int(self._began_s)

    def count(self) -> None:
        """Count one arrival."""
        self._go_on()
        self._counts[self._second % WINDOW_S] += 1

    @property
    def per_s(self) -> float | None:
        """Over the window, or since the beginning where that is shorter; None: it was too short ago to tell."""
        self._go_on()
        counted_s = self._clock() - self._began_s
        return None if counted_s < _LEAST_S else sum(self._counts) / min(float(WINDOW_S), counted_s)

    def _go_on(self) -> None:
        now = int(self._clock())
        for second in range(max(self._second, now - WINDOW_S) + 1, now + 1):
            self._counts[second % WINDOW_S] = 0
        self._second = now
